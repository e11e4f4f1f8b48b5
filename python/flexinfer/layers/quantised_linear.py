"""QuantisedLinear: a linear layer with a quantised weight, by our own kernel.

The kernel (cpp/kernels/linear/quantised_linear) reads 8 or 4 bits a weight, which is what a decode
step's time is made of. docs/quantisation.md compares it with what torch and oneDNN have. A row's
outputs are the same bits alone or among others.
"""

from __future__ import annotations

from functools import cache

import torch

from flexinfer import _kernels
from flexinfer.layers.linear import OpaqueLinear
from flexinfer.layers.quantised import QuantisedTensor
from flexinfer.runtime.kernels import DTYPES
from flexinfer.runtime.openmp import start_threads_address
from flexinfer.runtime.torch_settings import back_by_huge_pages

DTYPES_OF_INPUTS = (torch.float32, torch.bfloat16)
PANEL_COLUMNS = 64
COLUMNS_STEP = 16
"""The kernel writes so many outputs at once."""
NIBBLES = (0, 4, 1, 5), (2, 6, 3, 7)
"""Which of eight inputs are the lower and the upper four bits of a word's bytes."""


class QuantisedLinear(OpaqueLinear):
    """x [..., in_features] -> [..., out_features]"""

    def __init__(
        self, source: QuantisedTensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        """source: copied into panels; dtype: of inputs and outputs, one of DTYPES_OF_INPUTS."""
        super().__init__(source.integers, bias)
        self.block_rows = kernel().block_rows
        columns = self.out_features
        self._width = columns + -columns % COLUMNS_STEP
        if self.bias is not None:
            self.bias = torch.nn.functional.pad(self.bias.to(dtype), (0, self._width - columns))
        self.weight = torch.empty(0, dtype=dtype)
        """Of no numbers: the dtype of inputs and outputs."""
        self._words = words_of(source)
        back_by_huge_pages(self._words.data_ptr(), self._words.nbytes)
        numbers = [n for n in (source.scales, source.minimums) if n is not None]
        is_half = source.group > 0 and all(torch.equal(n.half().float(), n) for n in numbers)
        panels = [in_panels(n.half() if is_half else n).contiguous() for n in numbers]
        self._scales, self._minimums = panels[0], panels[1] if len(panels) > 1 else None
        self._sums = None
        if source.group == 0:
            self._sums = in_panels(128 * source.integers.sum(dim=1, dtype=torch.int32)[:, None])
        self._weight = _kernels.QuantisedWeight(
            words=self._words.data_ptr(),
            scales=self._scales.data_ptr(),
            minimums=0 if self._minimums is None else self._minimums.data_ptr(),
            sums=0 if self._sums is None else self._sums.data_ptr(),
            is_half=is_half,
            byte_inputs=source.byte_inputs,
            bits=source.bits,
            group=source.group,
            depth=self.in_features,
            columns=self._width,
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of inputs and outputs."""
        return self.weight.dtype

    def product(self) -> _kernels.Product:
        """As the kernel for a whole decoder layer takes it."""
        return _kernels.Product(
            panels=0,
            quantised=self._weight,
            bias=0 if self.bias is None else self.bias.data_ptr(),
            depth=self.in_features,
            columns=self._width,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the weight with its scales."""
        parts = (self._words, self._scales, self._minimums, self._sums)
        return sum(part.nbytes for part in parts if part is not None)

    def multiply(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """The residual is added while the product is still in registers."""
        dtype = self.weight.dtype
        if x.dtype != dtype or not x.is_cpu or x.shape[-1] != self.in_features:
            raise ValueError(
                f"a layer of {self.in_features} inputs of {dtype} on the CPU got "
                f"{tuple(x.shape)} {x.dtype} on {x.device}"
            )
        output = torch.empty(*x.shape[:-1], self._width, dtype=dtype)
        num_padding = self._width - self.out_features
        if residual is not None:
            wanted = (*x.shape[:-1], self.out_features)
            if residual.shape != wanted or residual.dtype != dtype or not residual.is_cpu:
                raise ValueError(
                    f"the residual must be {wanted} {dtype} on the CPU, got "
                    f"{tuple(residual.shape)} {residual.dtype} on {residual.device}"
                )
            if num_padding:
                residual = torch.nn.functional.pad(residual, (0, num_padding))
            residual = residual.contiguous()
        rows = x.reshape(-1, self.in_features)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        kernel().forward(
            DTYPES[dtype],
            self._weight,
            rows.data_ptr(),
            rows.stride(0),
            0 if self.bias is None else self.bias.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            self._width,
            output.data_ptr(),
            rows.shape[0],
            torch.get_num_threads(),
        )
        return output[..., : self.out_features].contiguous() if num_padding else output


def words_of(source: QuantisedTensor) -> torch.Tensor:
    """int32 [panels, depth / inputs of a word, 64], as cpp/kernels/calls/quantised.h says."""
    inputs = 32 // source.bits
    if source.integers.shape[1] % inputs or (source.group and source.group % inputs):
        raise ValueError(
            f"a weight of {source.bits} bits needs inputs and groups that are multiples of "
            f"{inputs}, got {source.integers.shape[1]} and {source.group}"
        )
    integers = source.integers
    columns, depth = integers.shape
    integers = torch.nn.functional.pad(integers, (0, 0, 0, -columns % PANEL_COLUMNS))
    integers = integers.view(-1, PANEL_COLUMNS, depth // inputs, inputs)
    if source.bits == 4:
        shifted = (integers + 8).to(torch.uint8)
        low, high = (shifted[..., list(order)] for order in NIBBLES)
        integers = (low | high << 4).view(torch.int8)
    return integers.transpose(1, 2).contiguous().view(torch.int32)[..., 0]


def in_panels(numbers: torch.Tensor) -> torch.Tensor:
    """[panels, groups, 64] of [columns, groups]; zeros fill the last panel."""
    columns, groups = numbers.shape
    numbers = torch.nn.functional.pad(numbers, (0, 0, 0, -columns % PANEL_COLUMNS))
    return numbers.view(-1, PANEL_COLUMNS, groups).transpose(1, 2).contiguous()


@cache
def kernel() -> _kernels.QuantisedLinear:
    return make_kernel()


def make_kernel(isa: str = "") -> _kernels.QuantisedLinear:
    """isa: a level, one of `available_quantised_isas()`; "": FLEXINFER_SIMD, or the best."""
    return _kernels.QuantisedLinear(start_threads_address(), isa)
