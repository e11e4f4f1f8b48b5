"""Lean operators: the parts that `lean_layers` puts into a model, as operators of torch.

A compiled model calls them where an eager one calls the functions behind them, and the compiler
does not look into them: with its own code for norms and rotary embeddings models took longer in
bfloat16 (docs/lean_step.md). As products are operators anyway, it has little to fuse. Modules that
call them in a graph `register` them when they are made.
"""

from __future__ import annotations

from functools import cache

import torch

from flexinfer.layers import host_linear as panel_linear
from flexinfer.layers import rows as row_ops
from flexinfer.layers.onednn_linear import PackedLinear, layer_of, linear_pointwise

OPERATORS = (
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    "rotate(Tensor x, Tensor cos, Tensor sin) -> Tensor",
    "gated_linear(Tensor x, int layer, int width) -> Tensor",
    "packed_gates(Tensor x, int gate, int up, str activation, str algorithm, int width) -> Tensor",
)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`row_ops.rms_norm`, in a graph."""
    output: torch.Tensor = torch.ops.flexinfer.rms_norm(x, weight, eps)
    return output


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`row_ops.rotate`, in a graph."""
    output: torch.Tensor = torch.ops.flexinfer.rotate(x, cos, sin)
    return output


def gated_linear(x: torch.Tensor, linear: panel_linear.PanelLinear) -> torch.Tensor:
    """`gated`, in a graph."""
    width = linear.out_features // 2
    output: torch.Tensor = torch.ops.flexinfer.gated_linear(x, linear.number, width)
    return output


def packed_gates(
    x: torch.Tensor, gate: PackedLinear, up: PackedLinear, activation: str, algorithm: str
) -> torch.Tensor:
    """activation(gate(x)) * up(x), each inside its product; the last two are oneDNN's names."""
    if torch.compiler.is_compiling():
        output: torch.Tensor = torch.ops.flexinfer.packed_gates(
            x, gate.number, up.number, activation, algorithm, up.out_features
        )
        return output
    gated = linear_pointwise(x, gate.weight, gate.bias, activation, [], algorithm)
    return linear_pointwise(x, gated, up.weight, up.bias, "mul")


def gated(linear: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """silu(gates) * factors of a layer whose outputs are both, one after the other; in its product
    where it can."""
    if isinstance(linear, panel_linear.PanelLinear) and linear.can_gate(x):
        return linear(x, gates=True)  # type: ignore[no-any-return]
    return _gate(linear(x))


def _gate(gates_and_factors: torch.Tensor) -> torch.Tensor:
    gates, factors = gates_and_factors.chunk(2, dim=-1)
    return row_ops.silu_mul(gates, factors)


@cache
def register() -> torch.library.Library:
    """Make the operators known to torch; once a process. They live as long as the library."""
    library = torch.library.Library("flexinfer", "FRAGMENT")  # type: ignore[no-untyped-call]
    for operator in OPERATORS:
        library.define(operator)  # type: ignore[no-untyped-call]
    for name, function, shape in (
        ("rms_norm", row_ops.rms_norm, _rms_norm_shape),
        ("rotate", row_ops.rotate, _rotate_shape),
        ("gated_linear", _gated_linear, _gated_linear_shape),
        ("packed_gates", _packed_gates, _packed_gates_shape),
    ):
        library.impl(name, function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"flexinfer::{name}", shape, lib=library)
    return library


def _gated_linear(x: torch.Tensor, layer: int, width: int) -> torch.Tensor:
    linear = layer_of(layer)
    assert isinstance(linear, panel_linear.PanelLinear)
    return linear.multiply_gates(x) if linear.can_gate(x) else _gate(linear.multiply(x, None))


def _packed_gates(
    x: torch.Tensor, gate: int, up: int, activation: str, algorithm: str, width: int
) -> torch.Tensor:
    return packed_gates(x, layer_of(gate), layer_of(up), activation, algorithm)


def _packed_gates_shape(
    x: torch.Tensor, gate: int, up: int, activation: str, algorithm: str, width: int
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], width)


def _rms_norm_shape(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape)


def _rotate_shape(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    batch, num_heads, num_tokens, width = x.shape
    return x.new_empty(batch, num_tokens, num_heads, width).transpose(1, 2)


def _gated_linear_shape(x: torch.Tensor, layer: int, width: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], width)
