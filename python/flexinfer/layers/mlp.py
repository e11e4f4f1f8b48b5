"""GatedMLP: transformers' gated MLP in three calls for five, the residual added by the last."""

from __future__ import annotations

from typing import Any

import torch

from flexinfer.layers import rows as row_ops
from flexinfer.layers.adapters import Part, are_in_force
from flexinfer.layers.formats import is_linear, make_linear, weight_of
from flexinfer.layers.known import GATED_MLPS
from flexinfer.layers.linear import Linear
from flexinfer.layers.recognise import is_known

BLOCK_ROWS = 1024
"""Float32 rows that are computed at once: 2,048 took 65 MiB more of memory in a model of 512 x 8
layers. In bfloat16 oneDNN loses a tenth of its speed in blocks."""


class GatedMLP(torch.nn.Module):
    """down(act(gate(x)) * up(x)): gate and up in one product; silu in one pass or in it."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_up_proj: Linear = make_linear(mlp.gate_proj, mlp.up_proj)
        self.down_proj: Linear = make_linear(mlp.down_proj)
        self.act_fn: torch.nn.Module = mlp.act_fn
        weight = mlp.gate_proj.weight
        can_gate = row_ops.supports(weight.dtype, weight.device, mlp.gate_proj.out_features)
        self.is_silu = can_gate and is_silu(mlp.act_fn)

    @property
    def joined(self) -> dict[str, Part]:
        """Where the outputs of the layers stand that were joined, by their names."""
        width = self.gate_up_proj.out_features // 2
        first = Part("gate_up_proj", 0, width)
        return {"gate_proj": first, "up_proj": first._replace(first=width)}

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x, residual: [1, tokens, width]; in float32 in blocks of at most BLOCK_ROWS tokens, as
        few and as equal as can be. Adapters stand by rows of the whole."""
        num_tokens = x.shape[-2]
        is_one_block = torch.compiler.is_compiling() or x.dtype != torch.float32
        if is_one_block or num_tokens <= BLOCK_ROWS or are_in_force():
            return self._compute(x, residual)
        num_blocks = -(-num_tokens // BLOCK_ROWS)
        output = x.new_empty(*x.shape[:-1], self.down_proj.out_features)
        for i in range(num_blocks):
            block = slice(num_tokens * i // num_blocks, num_tokens * (i + 1) // num_blocks)
            added = None if residual is None else residual[..., block, :]
            output[..., block, :] = self._compute(x[..., block, :], added)
        return output

    def _compute(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        if self.is_silu:
            return self.down_proj(self.gate_up_proj(x, gates=True), residual)  # type: ignore[no-any-return]
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.act_fn(gate) * up, residual)  # type: ignore[no-any-return]


def fuse_mlp(module: Any) -> GatedMLP | None:
    """What may take the module's place; None: it is of another kind."""
    if not is_known(module, GATED_MLPS):
        return None
    linears = [module.gate_proj, module.up_proj, module.down_proj]
    if not all(is_linear(linear) for linear in linears):
        return None
    return None if weight_of(linears[0]).device.type != "cpu" else GatedMLP(module)


def is_silu(activation: Any) -> bool:
    from transformers.activations import SiLUActivation

    return type(activation) in (torch.nn.SiLU, SiLUActivation)
