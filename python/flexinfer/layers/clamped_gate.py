"""ClampedGate: how gates and factors are combined in gpt-oss's experts, in the place of silu."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """(1 + factor) * gate * sigmoid(alpha * gate), of gates up to `limit`, and of factors from
    -`limit` to `limit` (OpenAI, gpt-oss, 2025)."""

    alpha: float
    limit: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.alpha) and math.isfinite(self.limit) and self.limit > 0):
            raise ValueError(
                f"a gate with alpha {self.alpha} and limit {self.limit} cannot be computed: both "
                "must be finite, and the limit above 0"
            )

    def __call__(self, gates: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """The definition; both of one shape and dtype, which the result has."""
        gates = gates.clamp(max=self.limit)
        factors = factors.clamp(-self.limit, self.limit)
        return (factors + 1) * gates * torch.sigmoid(self.alpha * gates)
