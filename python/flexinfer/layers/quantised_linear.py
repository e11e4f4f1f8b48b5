"""QuantisedLinear: a linear layer with a quantised weight, by our own kernel.

The kernel (cpp/kernels/linear/quantised_linear) reads 8 or 4 bits a weight, which is what a decode
step's time is made of. docs/quantisation.md compares it with what torch and oneDNN have. A row's
outputs are the same bits alone or among others.
"""

from __future__ import annotations

from functools import cache

import torch

from flexinfer import _kernels
from flexinfer.layers.linear import OpaqueLinear, check_operands
from flexinfer.layers.quantised import QuantisedTensor, QuantisedWeight
from flexinfer.layers.quantised_panels import QuantisedPanels, kernel_weight
from flexinfer.layers.rows import dense_rows
from flexinfer.runtime.activations import empty_activation
from flexinfer.runtime.kernels import DTYPES
from flexinfer.runtime.openmp import start_threads_address
from flexinfer.runtime.torch_settings import back_by_huge_pages

DTYPES_OF_INPUTS = (torch.float32, torch.bfloat16)
COLUMNS_STEP = 16
"""The kernel writes so many outputs at once."""


class QuantisedLinear(OpaqueLinear):
    """x [..., in_features] -> [..., out_features]"""

    def __init__(
        self, source: QuantisedWeight, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        """source: copied into panels; dtype: of inputs and outputs, one of DTYPES_OF_INPUTS."""
        super().__init__(torch.empty(source.shape, device="meta"), bias)
        self.block_rows = kernel().block_rows
        columns = self.out_features
        self._width = columns + -columns % COLUMNS_STEP
        if self.bias is not None:
            self.bias = torch.nn.functional.pad(self.bias.to(dtype), (0, self._width - columns))
        self.weight = torch.empty(0, dtype=dtype)
        """Of no numbers: the dtype of inputs and outputs."""
        self._panels = QuantisedPanels(source)
        back_by_huge_pages(self._panels.words.data_ptr(), self._panels.words.nbytes)
        self._weight = kernel_weight(source.kind, self._panels.parts, self._width)

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
        return self._panels.nbytes

    def rows(self, outputs: torch.Tensor) -> QuantisedTensor:
        """The weight's rows for some outputs, int64 [n]."""
        return self._panels.rows(outputs)

    def multiply(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """The residual is added while the product is still in registers."""
        dtype = self.weight.dtype
        check_operands(x, residual, self.in_features, (*x.shape[:-1], self.out_features), dtype)
        output = empty_activation((*x.shape[:-1], self._width), dtype)
        num_padding = self._width - self.out_features
        if residual is not None:
            if num_padding:
                residual = torch.nn.functional.pad(residual, (0, num_padding))
            residual = residual.contiguous()
        self._forward(x, residual, output, gates=False)
        return output[..., : self.out_features].contiguous() if num_padding else output

    def multiply_gates(self, x: torch.Tensor) -> torch.Tensor:
        """In the product where it can: the same bits as in two passes, and no gates and factors
        are held at once."""
        if not kernel().has_gates(self.out_features):
            return super().multiply_gates(x)
        dtype, shape = self.weight.dtype, (*x.shape[:-1], self.out_features // 2)
        check_operands(x, None, self.in_features, shape, dtype)
        output = empty_activation(shape, dtype)
        self._forward(x, None, output, gates=True)
        return output

    def _forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, output: torch.Tensor, *, gates: bool
    ) -> None:
        """Operands have been checked; the residual is dense."""
        rows = dense_rows(x)
        kernel().forward(
            DTYPES[self.weight.dtype],
            self._weight,
            rows.data_ptr(),
            rows.stride(0),
            0 if self.bias is None else self.bias.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            self._width,
            output.data_ptr(),
            rows.shape[0],
            gates,
            torch.get_num_threads(),
        )


@cache
def kernel() -> _kernels.QuantisedLinear:
    return make_kernel()


def make_kernel(isa: str = "") -> _kernels.QuantisedLinear:
    """isa: a level, one of `available_quantised_isas()`; "": FLEXINFER_SIMD, or the best."""
    return _kernels.QuantisedLinear(start_threads_address(), isa)
