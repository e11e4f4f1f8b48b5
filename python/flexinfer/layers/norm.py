"""RMSNorm: x / sqrt(mean(x^2) + eps) * weight, in one call for transformers' six to nine."""

from __future__ import annotations

from typing import Any

import torch

from flexinfer.layers import operators
from flexinfer.layers import rows as row_ops
from flexinfer.layers.known import NORMS, NORMS_AROUND_ONE, NORMS_WITH_SCALE
from flexinfer.layers.recognise import is_known


class RMSNorm(torch.nn.Module):
    """x [..., width] -> [..., width]. Not for training."""

    def __init__(self, weight: torch.Tensor, eps: float, *, is_wide: bool = False) -> None:
        """is_wide: the weight is float32, whatever x is, and so is all but the output."""
        super().__init__()
        operators.register()
        self.weight = torch.nn.Parameter(weight.detach().contiguous(), requires_grad=False)
        self.variance_epsilon = eps
        self.is_wide = is_wide

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self.weight.dtype and not self.is_wide:
            return torch.nn.functional.rms_norm(
                x, self.weight.shape, self.weight, self.variance_epsilon
            )
        if torch.compiler.is_compiling():
            return operators.rms_norm(x, self.weight, self.variance_epsilon)
        return row_ops.rms_norm(x, self.weight, self.variance_epsilon)


def fuse_norm(module: Any) -> RMSNorm | None:
    """What may take the module's place; None: it is of another kind."""
    is_wide = True
    if is_known(module, NORMS):
        weight, eps, is_wide = module.weight, module.variance_epsilon, False
    elif is_known(module, NORMS_AROUND_ONE):
        weight, eps = 1.0 + module.weight.float(), module.eps
    elif is_known(module, NORMS_WITH_SCALE):
        weight, eps = module.weight.float(), module.eps
    else:
        return None
    own = module.weight
    if own.dim() != 1 or not row_ops.supports(own.dtype, own.device, own.shape[0]):
        return None
    return RMSNorm(weight, eps, is_wide=is_wide)


def fused_norm(module: torch.nn.Module) -> torch.nn.Module:
    """What takes its place, or itself."""
    return fuse_norm(module) or module
