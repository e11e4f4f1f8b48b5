"""GatedMLP: transformers' gated MLP in three calls for five, the residual added by the last."""

from __future__ import annotations

from typing import Any

import torch

from flexinfer.layers import rows as row_ops
from flexinfer.layers.activation import GELU_TANH, SILU, activation_of
from flexinfer.layers.adapters import Part, are_in_force
from flexinfer.layers.formats import is_linear, make_linear, weight_of
from flexinfer.layers.known import GATED_MLPS
from flexinfer.layers.linear import Linear
from flexinfer.layers.recognise import is_known
from flexinfer.runtime.activations import empty_activation

BLOCK_ROWS = 1024
"""Float32 rows that are computed at once: 2,048 took 65 MiB more of memory in a model of 512 x 8
layers. In bfloat16 oneDNN loses a tenth of its speed in blocks; kernels that read their weight once
for each `Linear.block_rows` lose nothing."""


class GatedMLP(torch.nn.Module):
    """down(act(gate(x)) * up(x)): gate and up in one product; silu in one pass or in it, and
    gelu by tanh in one pass."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_up_proj: Linear = make_linear(mlp.gate_proj, mlp.up_proj)
        self.down_proj: Linear = make_linear(mlp.down_proj)
        self.act_fn: torch.nn.Module = mlp.act_fn
        weight = mlp.gate_proj.weight
        can_gate = row_ops.supports(weight.dtype, weight.device, mlp.gate_proj.out_features)
        self.activation = activation_of(mlp.act_fn) if can_gate else None
        """None: one that our kernels do not know, or not for this width."""

    @property
    def joined(self) -> dict[str, Part]:
        """Where the outputs of the layers stand that were joined, by their names."""
        width = self.gate_up_proj.out_features // 2
        first = Part("gate_up_proj", 0, width)
        return {"gate_proj": first, "up_proj": first._replace(first=width)}

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x, residual: [1, tokens, width]; in blocks of tokens. Adapters stand by rows of the
        whole."""
        num_tokens = x.shape[-2]
        block_rows = self._block_rows(num_tokens, x.dtype)
        if num_tokens <= block_rows or are_in_force():
            return self._compute(x, residual)
        output = empty_activation((*x.shape[:-1], self.down_proj.out_features), x.dtype)
        for first in range(0, num_tokens, block_rows):
            block = slice(first, first + block_rows)
            added = None if residual is None else residual[..., block, :]
            output[..., block, :] = self._compute(x[..., block, :], added)
        return output

    def _block_rows(self, num_tokens: int, dtype: torch.dtype) -> int:
        """Of how many rows the hidden numbers are held at once: blocks as few and as equal as can
        be."""
        most = BLOCK_ROWS if dtype == torch.float32 else num_tokens
        of_kernels = self.gate_up_proj.block_rows, self.down_proj.block_rows
        if of_kernels[0] is not None and of_kernels[0] == of_kernels[1]:
            most = of_kernels[0]
        if torch.compiler.is_compiling() or num_tokens <= most:
            return num_tokens
        return -(-num_tokens // -(-num_tokens // most))

    def _compute(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        if self.activation == SILU:
            return self.down_proj(self.gate_up_proj(x, gates=True), residual)  # type: ignore[no-any-return]
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        if self.activation == GELU_TANH and not torch.compiler.is_compiling():
            # A third of torch's time, or less, of 16 rows and more; as long of one.
            return self.down_proj(row_ops.gelu_tanh_mul(gate, up), residual)  # type: ignore[no-any-return]
        return self.down_proj(self.act_fn(gate) * up, residual)  # type: ignore[no-any-return]


def fuse_mlp(module: Any) -> GatedMLP | None:
    """What may take the module's place; None: it is of another kind."""
    if not is_known(module, GATED_MLPS):
        return None
    linears = [module.gate_proj, module.up_proj, module.down_proj]
    if not all(is_linear(linear) for linear in linears):
        return None
    return None if weight_of(linears[0]).device.type != "cpu" else GatedMLP(module)
