"""Gated MLPs of transformers in fewer calls: PackedGatedMLP where oneDNN has packed kernels, else
GatedMLP. Both add the residual in their last product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flexinfer.layers import operators as lean_operators
from flexinfer.layers import rows as row_ops
from flexinfer.layers.host_linear import PanelLinear
from flexinfer.layers.onednn_linear import PackedLinear
from flexinfer.layers.operators import gated
from flexinfer.layers.pack import add_linear, join_linears, packed_class

ACTIVATIONS: dict[str, tuple[str, str]] = {
    "SiLU": ("swish", ""),
    "SiLUActivation": ("swish", ""),
    "GELU": ("gelu", "none"),
    "GELUActivation": ("gelu", "none"),
    "GELUTanh": ("gelu", "tanh"),
    "PytorchGELUTanh": ("gelu", "tanh"),
}
"""Class of the activation -> oneDNN's name and algorithm."""


BLOCK_ROWS = 1024
"""Float32 rows that are computed at once: 2,048 took 65 MiB more of memory in a model of 512 x 8
layers. In bfloat16 oneDNN loses a tenth of its speed in blocks."""


def in_row_blocks(
    compute: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor],
    x: torch.Tensor,
    residual: torch.Tensor | None,
    width: int,
) -> torch.Tensor:
    """compute(x, residual), [1, tokens, width], in float32 in blocks of at most BLOCK_ROWS tokens,
    as few and as equal as can be."""
    num_tokens = x.shape[-2]
    if num_tokens <= BLOCK_ROWS or x.dtype != torch.float32:
        return compute(x, residual)
    num_blocks = -(-num_tokens // BLOCK_ROWS)
    output = x.new_empty(*x.shape[:-1], width)
    for i in range(num_blocks):
        block = slice(num_tokens * i // num_blocks, num_tokens * (i + 1) // num_blocks)
        added = None if residual is None else residual[..., block, :]
        output[..., block, :] = compute(x[..., block, :], added)
    return output


class PackedGatedMLP(torch.nn.Module):
    """down(act(gate(x)) * up(x)), activation and product inside the two matrix products."""

    def __init__(self, mlp: torch.nn.Module) -> None:
        super().__init__()
        self.gate_proj = _packed(mlp.gate_proj)
        self.up_proj = _packed(mlp.up_proj)
        self.down_proj = _packed(mlp.down_proj)
        lean_operators.register()
        self._activation, self._algorithm = ACTIVATIONS[type(mlp.act_fn).__name__]

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        gated = lean_operators.packed_gates(
            x, self.gate_proj, self.up_proj, self._activation, self._algorithm
        )
        return add_linear(self.down_proj, gated, residual)


class GatedMLP(torch.nn.Module):
    """down(silu(gate(x)) * up(x)), activation and product in one pass or in the layer's product."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        lean_operators.register()
        self.gate_up_proj: torch.nn.Module = join_linears(mlp.gate_proj, mlp.up_proj)
        self.down_proj: Any = mlp.down_proj

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if torch.compiler.is_compiling():
            if isinstance(self.gate_up_proj, PanelLinear):
                hidden = lean_operators.gated_linear(x, self.gate_up_proj)
            else:
                gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
                hidden = torch.nn.functional.silu(gate) * up
            return add_linear(self.down_proj, hidden, residual)
        return in_row_blocks(self._compute, x, residual, self.down_proj.out_features)

    def _compute(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        return add_linear(self.down_proj, gated(self.gate_up_proj, x), residual)


def lean_mlp(module: torch.nn.Module) -> PackedGatedMLP | GatedMLP | None:
    """What may take the module's place, if it computes the same."""
    children = dict(module.named_children())
    linears = [children.pop(name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    activation = ACTIVATIONS.get(type(children.pop("act_fn", None)).__name__)
    if activation is None or children:
        return None
    if all(type(linear) is PackedLinear for linear in linears):
        return PackedGatedMLP(module)
    gate = linears[0]
    if activation[0] != "swish" or not all(type(x) is torch.nn.Linear for x in linears):
        return None
    assert isinstance(gate, torch.nn.Linear)
    weight = gate.weight
    if packed_class(weight) is PackedLinear:
        return None  # better packed first
    can_run = row_ops.supports(weight.dtype, weight.device, gate.out_features)
    return GatedMLP(module) if can_run else None


def _packed(module: torch.nn.Module | torch.Tensor) -> PackedLinear:
    assert isinstance(module, PackedLinear)
    return module
