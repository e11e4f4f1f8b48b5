"""Activation: what the second product of an MLP is given, of the outputs of the first one.

SILU              silu(gates) * factors     SwiGLU (Shazeer, 2020): Llama, Mixtral, Qwen, ...
GELU_TANH         gelu(gates) * factors     GEGLU, gelu by tanh: Gemma
CLAMPED_SWIGLU    (1 + factors) * gates * sigmoid(alpha * gates), of gates up to a limit, and of
                  factors from -limit to limit: gpt-oss (OpenAI, 2025)
RELU2             max(factors, 0)^2, there are no gates: Nemotron-H (So et al., Primer, 2021)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn


class ActivationKind(Enum):
    """By the kernel's names."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    CLAMPED_SWIGLU = "clamped_swiglu"
    RELU2 = "relu2"


@dataclass(frozen=True, slots=True)
class Activation:
    kind: ActivationKind = ActivationKind.SILU
    alpha: float = 1.0
    limit: float = 0.0
    """These two are CLAMPED_SWIGLU's."""

    def __post_init__(self) -> None:
        """Raises ValueError for numbers of CLAMPED_SWIGLU that are none to compute with."""
        is_finite = math.isfinite(self.alpha) and math.isfinite(self.limit)
        if self.kind == ActivationKind.CLAMPED_SWIGLU and not (is_finite and self.limit > 0):
            raise ValueError(
                f"a gate with alpha {self.alpha} and limit {self.limit} cannot be computed: both "
                "must be finite, and the limit above 0"
            )

    @property
    def has_gates(self) -> bool:
        return self.kind != ActivationKind.RELU2

    def __call__(self, outputs: torch.Tensor) -> torch.Tensor:
        """The definition. outputs: [..., 2 * hidden], gates and then factors, or without gates
        [..., hidden]; the result is [..., hidden] of their dtype."""
        if self.kind == ActivationKind.RELU2:
            return nn.functional.relu(outputs).square()
        gates, factors = outputs.chunk(2, dim=-1)
        if self.kind == ActivationKind.SILU:
            return nn.functional.silu(gates) * factors
        if self.kind == ActivationKind.GELU_TANH:
            return nn.functional.gelu(gates, approximate="tanh") * factors
        gates = gates.clamp(max=self.limit)
        factors = factors.clamp(-self.limit, self.limit)
        return (factors + 1) * gates * torch.sigmoid(self.alpha * gates)


SILU = Activation()
GELU_TANH = Activation(ActivationKind.GELU_TANH)
RELU2 = Activation(ActivationKind.RELU2)


def clamped_swiglu(alpha: float, limit: float) -> Activation:
    """Raises ValueError for numbers that are none to compute with."""
    return Activation(ActivationKind.CLAMPED_SWIGLU, alpha, limit)


def activation_of(function: Any) -> Activation | None:
    """What an activation of transformers computes, of gates where there are some: one of SILU,
    GELU_TANH and RELU2. None: something else."""
    from transformers.activations import ACT2CLS

    kind = type(function)
    if kind in (nn.SiLU, ACT2CLS["silu"]) or function is nn.functional.silu:  # LFM2's experts
        return SILU
    if kind is nn.GELU:
        return GELU_TANH if function.approximate == "tanh" else None
    if kind is ACT2CLS["gelu_pytorch_tanh"]:
        return GELU_TANH if _is_gelu_tanh(getattr(function, "act", None)) else None
    return RELU2 if kind is ACT2CLS["relu2"] else None


def _is_gelu_tanh(act: Any) -> bool:
    """Whether this is torch's own: it may be written out in Python, with roundings of its own."""
    is_gelu = isinstance(act, partial) and act.func is nn.functional.gelu and not act.args
    return is_gelu and act.keywords == {"approximate": "tanh"}
