"""HostLinear: a linear layer by our own kernel, whose weight lies in panels.

A decode step is bound by reading the weights. oneDNN and MKL reach their speed with hundreds of
rows; with 1 to 64 of them they take up to twice as long as reading takes
(docs/cpu_performance.md). The kernel (cpp/kernels/linear) reads a weight as one stream.

A prefill is bound by arithmetic. AMX multiplies bfloat16 alone, but sixteen times as fast as
AVX-512 float32: the kernel takes each float32 number for the sum of three bfloat16 ones and adds up
six products of them, which gives float32's accuracy (simd/amx_split_linear.h). In bfloat16 it keeps
the tiles busier than oneDNN (simd/amx_many_linear.h). By pairs (simd/pair_many_linear.h) and in
float32 (simd/many_linear.h) it is as fast as oneDNN, but hands its blocks to whichever thread runs:
oneDNN gives each thread half, and waits for the one that another process keeps from its CPU. Where
a CPU has no products of bfloat16, oneDNN takes five times as long with it as with float32, and
torch more; the kernel widens a weight once for all rows. Gates of an MLP are computed with the
product that they come from.
"""

from __future__ import annotations

from functools import cache

import torch

from flexinfer import _kernels
from flexinfer.layers.linear import OpaqueLinear, check_operands
from flexinfer.layers.rows import dense_rows
from flexinfer.runtime.activations import empty_activation
from flexinfer.runtime.kernels import DTYPES
from flexinfer.runtime.openmp import start_threads_address
from flexinfer.runtime.torch_settings import back_by_huge_pages

ISAS = ("avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx")
"""Instruction sets with which the kernel was measured to be as fast as torch, or faster."""
MAX_FEW_ROWS = 48
"""With more rows gates are computed with their product, with whatever instruction set."""
DEPTH_STEP = 32
COLUMNS_STEP = 16
"""The kernel writes so many outputs at once."""


def supports(weight: torch.Tensor) -> bool:
    """Whether a layer with this weight [out_features, in_features] is faster here."""
    return can_run(weight) and kernel().isa in ISAS


def can_run(weight: torch.Tensor) -> bool:
    """Whether the kernel can compute this layer, on whatever CPU."""
    if weight.device.type != "cpu" or weight.dim() != 2:
        return False
    depth = weight.shape[1]
    fits = depth % DEPTH_STEP == 0 and weight.numel() > 0
    return fits and weight.dtype in (torch.float32, torch.bfloat16)


def panel_columns(dtype: torch.dtype) -> int:
    """Outputs that stand side by side in a packed weight."""
    return kernel().panel_columns(DTYPES[dtype])


def in_panels(weight: torch.Tensor) -> torch.Tensor:
    """float32 [panels, depth, 64], bfloat16 [panels, depth / 2, 64, 2] (on AMX 32) of a weight
    [columns, depth]; zeros fill the last panel. REQUIRES `can_run`."""
    columns, depth = weight.shape
    width = panel_columns(weight.dtype)
    if columns % width:
        weight = torch.cat((weight, weight.new_zeros(-columns % width, depth)))
    if weight.dtype == torch.bfloat16:
        return weight.view(-1, width, depth // 2, 2).permute(0, 2, 1, 3).contiguous()
    return weight.view(-1, width, depth).transpose(1, 2).contiguous()


class HostLinear(OpaqueLinear):
    """x [..., in_features] -> [..., out_features]; REQUIRES a weight that `can_run` accepts."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """weight: [out_features, in_features], copied into panels."""
        super().__init__(weight, bias)
        self._padding = -self.out_features % COLUMNS_STEP
        if self.bias is not None and self._padding:
            self.bias = torch.nn.functional.pad(self.bias, (0, self._padding))
        self.dtype = weight.dtype
        self.weight = in_panels(weight.detach())
        """Opaque, but for its dtype and device."""
        self._panels: int = self.weight.data_ptr()
        back_by_huge_pages(self._panels, self.weight.numel() * self.weight.element_size())

    def product(self) -> _kernels.Product:
        """As the kernel for a whole decoder layer takes it."""
        return _kernels.Product(
            panels=self._panels,
            quantised=None,
            bias=0 if self.bias is None else self.bias.data_ptr(),
            depth=self.in_features,
            columns=self.out_features + self._padding,
        )

    def multiply(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        columns, padding = self.out_features, self._padding
        output = empty_activation((*x.shape[:-1], columns + padding), self.dtype)
        if padding and residual is not None:
            residual = torch.nn.functional.pad(residual, (0, padding))
        multiply_panels(x, self._panels, self.in_features, self.bias, residual, output)
        return output[..., :columns].contiguous() if padding else output

    def multiply_gates(self, x: torch.Tensor) -> torch.Tensor:
        """In the product where it can: the same bits as in two passes."""
        if not can_gate(x, self.out_features):
            return super().multiply_gates(x)
        output = empty_activation((*x.shape[:-1], self.out_features // 2), self.dtype)
        multiply_panels(x, self._panels, self.in_features, self.bias, None, output, gates=True)
        return output


def multiply_panels(
    x: torch.Tensor,
    panels: int,
    depth: int,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    output: torch.Tensor,
    *,
    gates: bool = False,
) -> None:
    """output [..., columns] = x [..., depth] weight^T + bias + residual.

    panels: address of `in_panels` of the weight; output: dense, which says columns and dtype.
    gates: output [..., columns / 2] = silu(first half) * second half, without residual; REQUIRES
    `can_gate`.
    Raises ValueError for what the kernel would read beyond.
    """
    dtype, columns = output.dtype, output.shape[-1] * (2 if gates else 1)
    if gates and (residual is not None or not can_gate(x, columns)):
        raise ValueError(
            f"gates take no residual, more than {MAX_FEW_ROWS} rows, products of their dtype for "
            f"many of them, and a multiple of {2 * panel_columns(dtype)} outputs; got "
            f"{tuple(x.shape)} {x.dtype} and {columns} outputs on {kernel().isa}"
        )
    check_operands(x, residual, depth, output.shape, dtype)
    residual = None if residual is None else residual.contiguous()
    rows = dense_rows(x)
    kernel().forward(
        DTYPES[dtype],
        rows.data_ptr(),
        rows.stride(0),
        panels,
        0 if bias is None else bias.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        columns,
        output.data_ptr(),
        rows.shape[0],
        depth,
        columns,
        gates,
        torch.get_num_threads(),
    )


def can_gate(x: torch.Tensor, columns: int) -> bool:
    """Whether the kernel computes `columns` gates and factors in all of x [..., depth]:
    each stand in panels of their own, and the rows are many."""
    depth = x.shape[-1]
    return (
        x.dtype in DTYPES
        and kernel().has_gates(DTYPES[x.dtype], depth)
        and columns % (2 * panel_columns(x.dtype)) == 0
        and x.numel() > MAX_FEW_ROWS * depth
    )


@cache
def kernel() -> _kernels.Linear:
    return make_kernel()


def make_kernel(isa: str = "") -> _kernels.Linear:
    """isa: instruction set, one of `available_isas()`; "": FLEXINFER_SIMD, or the best."""
    return _kernels.Linear(start_threads_address(), isa)
