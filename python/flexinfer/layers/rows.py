"""Row operations on the CPU by our own kernel: RMSNorm, gates of MLPs, rotary embedding.

torch has no fused kernels for these on CPUs: a norm is six operators, a rotary embedding fourteen,
each a pass over memory and some microseconds of dispatch. One call each here. `supports` says for
which tensors; a caller takes torch's way for others. The kernel trusts its addresses, so each
function first sees that what will be read is there, and raises ValueError if it is not.
"""

from __future__ import annotations

from functools import cache
from typing import NoReturn

import torch

from flexinfer import _kernels
from flexinfer.runtime.activations import empty_activation
from flexinfer.runtime.kernels import DTYPES
from flexinfer.runtime.openmp import start_threads_address

WIDTH_STEP = 16


def supports(dtype: torch.dtype, device: torch.device, width: int) -> bool:
    """Whether rows of this width can be computed here."""
    return dtype in DTYPES and device.type == "cpu" and width % WIDTH_STEP == 0


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight. x: [..., width]; weight: [width], dense, of x's dtype, or
    float32: then nothing is rounded before the result, which is of x's dtype."""
    is_wide = weight.dtype == torch.float32
    if not (
        weight.shape == x.shape[-1:]
        and (_are_rows(x) and weight.is_cpu if is_wide else _are_rows(x, weight))
        and weight.stride(0) == 1
        and weight.shape[0] % WIDTH_STEP == 0
    ):
        _refuse("rms_norm", "x [..., width] and a dense weight [width]", WIDTH_STEP, x, weight)
    rows = dense_rows(x)
    num_rows, width = rows.shape
    output = empty_activation(x.shape, x.dtype)
    kernel().rms_norm(
        DTYPES[x.dtype],
        rows.data_ptr(),
        rows.stride(0),
        weight.data_ptr(),
        is_wide,
        output.data_ptr(),
        num_rows,
        width,
        eps,
        torch.get_num_threads(),
    )
    return output


def silu_mul(gate: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """silu(gate) * factor; both [..., width] of one dtype."""
    return _multiply_gates("silu_mul", gate, factor)


def gelu_tanh_mul(gate: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * factor, gelu by tanh; both [..., width] of one dtype."""
    return _multiply_gates("gelu_tanh_mul", gate, factor)


def relu2(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)^2; x: [..., width]."""
    if not (_are_rows(x) and x.dim() > 0 and x.shape[-1] % WIDTH_STEP == 0):
        _refuse("relu2", "x [..., width]", WIDTH_STEP, x)
    rows = dense_rows(x)
    num_rows, width = rows.shape
    output = empty_activation(x.shape, x.dtype)
    kernel().relu2(
        DTYPES[x.dtype],
        rows.data_ptr(),
        rows.stride(0),
        output.data_ptr(),
        num_rows,
        width,
        torch.get_num_threads(),
    )
    return output


def _multiply_gates(operation: str, gate: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    if not (
        gate.shape == factor.shape
        and _are_rows(gate, factor)
        and gate.dim() > 0
        and gate.shape[-1] % WIDTH_STEP == 0
    ):
        _refuse(operation, "gate and factor [..., width]", WIDTH_STEP, gate, factor)
    gates, factors = dense_rows(gate), dense_rows(factor)
    num_rows, width = gates.shape
    output = empty_activation(gate.shape, gate.dtype)
    getattr(kernel(), operation)(
        DTYPES[gate.dtype],
        gates.data_ptr(),
        gates.stride(0),
        factors.data_ptr(),
        factors.stride(0),
        output.data_ptr(),
        num_rows,
        width,
        torch.get_num_threads(),
    )
    return output


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [1, heads, tokens, width] rotated by cos and sin [1, tokens, width], all of one dtype.

    Pairs are (j, j + width / 2). The result lies in memory as [tokens, heads, width].
    """
    return _rotate(x if x.stride(-1) == 1 else x.contiguous(), cos, sin, None)


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As `rotate`, in place; x's last dimension is dense."""
    return _rotate(x, cos, sin, x)


def _rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, output: torch.Tensor | None
) -> torch.Tensor:
    if not (
        x.dim() == 4
        and x.shape[0] == 1
        and cos.shape == sin.shape == x.shape[:1] + x.shape[2:]
        and _are_rows(x, cos, sin)
        and x.shape[3] % (2 * WIDTH_STEP) == 0
        and x.stride(3) == 1
    ):
        expected = "x [1, heads, tokens, width], its rows dense, cos and sin [1, tokens, width]"
        _refuse("rotate", expected, 2 * WIDTH_STEP, x, cos, sin)
    _, num_heads, num_tokens, width = x.shape
    if output is None:
        shape = (1, num_tokens, num_heads, width)
        output = empty_activation(shape, x.dtype).transpose(1, 2)
    cos, sin = cos.contiguous(), sin.contiguous()
    kernel().rotate(
        DTYPES[x.dtype],
        x.data_ptr(),
        x.stride(1),
        x.stride(2),
        cos.data_ptr(),
        sin.data_ptr(),
        output.data_ptr(),
        output.stride(1),
        output.stride(2),
        num_heads,
        num_tokens,
        width,
        torch.get_num_threads(),
    )
    return output


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """[rows, width] of x [..., width]; a copy only if its rows are not dense or not in line."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _are_rows(*tensors: torch.Tensor) -> bool:
    """Whether all are on the CPU, of one dtype that the kernel knows."""
    dtype = tensors[0].dtype
    for tensor in tensors:  # twice as fast as all(...), and called several times per layer
        if not tensor.is_cpu or tensor.dtype != dtype:
            return False
    return dtype in DTYPES


def _refuse(operation: str, expected: str, step: int, *tensors: torch.Tensor) -> NoReturn:
    got = ", ".join(f"{tuple(t.shape)} {t.dtype} on {t.device}" for t in tensors)
    raise ValueError(
        f"row_ops.{operation} takes {expected} on the CPU, of one dtype among "
        f"{', '.join(str(dtype) for dtype in DTYPES)}, width a multiple of {step}; got {got}"
    )


@cache
def kernel() -> _kernels.RowOps:
    return make_kernel()


def make_kernel(isa: str = "") -> _kernels.RowOps:
    """isa: instruction set, one of `available_isas()`; "": FLEXINFER_SIMD, or the best."""
    return _kernels.RowOps(start_threads_address(), isa)
