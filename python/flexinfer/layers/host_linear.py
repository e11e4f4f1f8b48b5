"""HostLinear: an OneDnnLinear that does the few rows of a decode step by our own kernel, and the
many of a prefill where AMX or products of bfloat16 pairs are.

A decode step is bound by reading the weights. oneDNN and MKL reach their speed with hundreds of
rows; with 1 to 64 of them they take up to twice as long as reading takes
(docs/cpu_performance.md). The kernel (cpp/kernels/linear) reads the weight in the order in which
oneDNN has packed it, so that both work on the same memory: panels of 64 outputs, 32 for AMX's
bfloat16. That order is oneDNN's own affair; whether it is this one is seen by comparison, once for
each shape.

A prefill is bound by arithmetic. AMX multiplies bfloat16 alone, but sixteen times as fast as
AVX-512 float32: the kernel takes each float32 number for the sum of three bfloat16 ones and adds up
six products of them, which gives float32's accuracy (simd/amx_split_linear.h). oneDNN does not. In
bfloat16 it keeps the tiles busier than oneDNN (simd/amx_many_linear.h). By pairs it is as fast as
oneDNN (simd/pair_many_linear.h), but hands its blocks to whichever thread runs: oneDNN gives each
thread half, and waits for the one that another process keeps from its CPU. Both compute the gates
of an MLP with the product that they come from.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from flexinfer import _kernels
from flexinfer.layers.onednn_linear import OneDnnLinear, can_pack, pack_weight
from flexinfer.runtime.kernels import DTYPES
from flexinfer.runtime.openmp import start_threads_address

ISAS = {
    torch.float32: ("avx512", "avx512_bf16", "amx"),
    torch.bfloat16: ("avx512_bf16", "amx"),
}
"""Instruction sets with which the kernel was measured to be faster than oneDNN."""
MAX_ROWS = {torch.float32: 64, torch.bfloat16: 48}
"""With more rows oneDNN is as fast, where the kernel has no way of its own for many rows."""
DEPTH_STEP = {torch.float32: 1, torch.bfloat16: 32}
COLUMNS_STEP = 16


def supports(weight: torch.Tensor) -> bool:
    """Whether a layer with this weight [out_features, in_features] is faster here."""
    return (
        can_run(weight)
        and kernel().isa in ISAS[weight.dtype]
        and can_pack(weight.dtype, weight.device)
        and is_packed_in_panels(weight.dtype, *weight.shape)
    )


def can_run(weight: torch.Tensor) -> bool:
    """Whether the kernel can compute this layer, on whatever CPU."""
    if weight.device.type != "cpu" or weight.dtype not in DEPTH_STEP or weight.dim() != 2:
        return False
    columns, depth = weight.shape
    return columns % COLUMNS_STEP == 0 and depth % DEPTH_STEP[weight.dtype] == 0 and depth > 0


@cache
def is_packed_in_panels(dtype: torch.dtype, columns: int, depth: int) -> bool:
    """Whether oneDNN packs a weight of this shape as `in_panels` does."""
    period = torch.arange(251, dtype=dtype)  # exact in bfloat16; no period of a panel
    weight = period.repeat(columns * depth // 251 + 1)[: columns * depth].view(columns, depth)
    packed = pack_weight(weight)
    panels = in_panels(weight)
    num_bytes = panels.numel() * panels.element_size()
    if torch.ops.mkldnn._nbytes(packed) != num_bytes:
        return False
    found = ctypes.string_at(torch.ops.mkldnn.data_ptr(packed), num_bytes)
    return found == ctypes.string_at(panels.data_ptr(), num_bytes)


def panel_columns(dtype: torch.dtype) -> int:
    """Outputs that stand side by side in a packed weight."""
    return kernel().panel_columns(DTYPES[dtype])


def in_panels(weight: torch.Tensor) -> torch.Tensor:
    """float32 [panels, depth, 64], bfloat16 [panels, depth / 2, 32 or 64, 2] of a weight [columns,
    depth]; zeros fill the last panel. REQUIRES `can_run`."""
    columns, depth = weight.shape
    width = panel_columns(weight.dtype)
    weight = torch.cat((weight, weight.new_zeros(-columns % width, depth)))
    if weight.dtype == torch.bfloat16:
        return weight.view(-1, width, depth // 2, 2).permute(0, 2, 1, 3).contiguous()
    return weight.view(-1, width, depth).transpose(1, 2).contiguous()


class HostLinear(OneDnnLinear):
    """x [..., in_features] -> [..., out_features]; REQUIRES a weight that `supports` accepts."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self.dtype = weight.dtype
        self._max_rows = MAX_ROWS[weight.dtype]
        self._has_many_rows = kernel().has_many_rows(DTYPES[weight.dtype], self.in_features)
        self.compiles_row_counts = not self._has_many_rows
        self._panels: int = torch.ops.mkldnn.data_ptr(self.weight)

    def product(self) -> _kernels.Product:
        """As the kernel for a whole decoder layer takes it."""
        return _kernels.Product(
            panels=self._panels,
            quantised=None,
            bias=0 if self.bias is None else self.bias.data_ptr(),
            depth=self.in_features,
            columns=self.out_features,
        )

    def multiply(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        num_rows = x.numel() // self.in_features
        if num_rows > self._max_rows and not self._has_many_rows:
            return super().multiply(x, residual)
        output = torch.empty(*x.shape[:-1], self.out_features, dtype=self.dtype)
        multiply_panels(x, self._panels, self.in_features, self.bias, residual, output)
        return output

    def multiply_gates(self, x: torch.Tensor) -> torch.Tensor:
        """In the product where it can: the same bits as in two passes."""
        if not can_gate(x, self.out_features):
            return super().multiply_gates(x)
        output = torch.empty(*x.shape[:-1], self.out_features // 2, dtype=self.dtype)
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
    more than MAX_ROWS rows, `can_gate`, and a kernel that has many rows of this dtype.
    Raises ValueError for what the kernel would read beyond.
    """
    dtype, columns = output.dtype, output.shape[-1] * (2 if gates else 1)
    if gates and (residual is not None or not can_gate(x, columns)):
        raise ValueError(
            f"gates take no residual, more than {MAX_ROWS[torch.bfloat16]} rows of bfloat16, a "
            f"kernel for many of them, and a multiple of {2 * panel_columns(torch.bfloat16)} "
            f"outputs; got {tuple(x.shape)} {x.dtype} and {columns} outputs on {kernel().isa}"
        )
    if x.dtype != dtype or not x.is_cpu or x.shape != (*output.shape[:-1], depth):
        raise ValueError(
            f"a layer of {depth} inputs and {columns} outputs of {dtype} on the CPU got "
            f"{tuple(x.shape)} {x.dtype} on {x.device}"
        )
    if residual is not None:
        if residual.shape != output.shape or residual.dtype != dtype or not residual.is_cpu:
            raise ValueError(
                f"the residual must be {tuple(output.shape)} {dtype} on the CPU, got "
                f"{tuple(residual.shape)} {residual.dtype} on {residual.device}"
            )
        residual = residual.contiguous()
    rows = x.reshape(-1, depth)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
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
    dtype, depth = x.dtype, x.shape[-1]
    return (
        dtype == torch.bfloat16
        and columns % (2 * panel_columns(dtype)) == 0
        and x.numel() > MAX_ROWS[dtype] * depth
        and kernel().has_many_rows(DTYPES[dtype], depth)
    )


@cache
def kernel() -> _kernels.Linear:
    return make_kernel()


def make_kernel(isa: str = "") -> _kernels.Linear:
    """isa: instruction set, one of `available_isas()`; "": FLEXINFER_SIMD, or the best."""
    return _kernels.Linear(start_threads_address(), isa)
