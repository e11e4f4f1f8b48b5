"""RMSNorm: x / sqrt(mean(x^2) + eps) * weight, in one call for transformers' six."""

from __future__ import annotations

from typing import Any

import torch

from flexinfer.layers import operators
from flexinfer.layers import rows as row_ops
from flexinfer.layers.known import NORMS
from flexinfer.layers.recognise import is_known


class RMSNorm(torch.nn.Module):
    """x [..., width] -> [..., width]. Not for training."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        operators.register()
        self.weight = torch.nn.Parameter(weight.detach().contiguous(), requires_grad=False)
        self.variance_epsilon = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self.weight.dtype:
            return torch.nn.functional.rms_norm(
                x, self.weight.shape, self.weight, self.variance_epsilon
            )
        if torch.compiler.is_compiling():
            return operators.rms_norm(x, self.weight, self.variance_epsilon)
        return row_ops.rms_norm(x, self.weight, self.variance_epsilon)


def fuse_norm(module: Any) -> RMSNorm | None:
    """What may take the module's place; None: it is of another kind."""
    if not is_known(module, NORMS):
        return None
    weight = module.weight
    if weight.dim() != 1 or not row_ops.supports(weight.dtype, weight.device, weight.shape[0]):
        return None
    return RMSNorm(weight, module.variance_epsilon)
