"""Eager experts: mixtures of experts whose weights torch's grouped product refuses ("strides should
be multiple of 16 bytes") are multiplied by one expert after the other, as transformers can.

Ends when `torch.nn.functional.grouped_mm` takes rows of any length, or transformers asks it first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from flexinfer.errors import UnsupportedModelError

ALIGNMENT_BYTES = 16
"""Of the rows of each factor of a grouped product."""


def use_eager_experts(model: torch.nn.Module) -> None:
    """Where nothing else can: of a model that was handed over, too, which could not run."""
    for config in _configs_of_odd(model):
        if config._experts_implementation == "grouped_mm":
            config._experts_implementation = "eager"


def check_experts_compilable(model: torch.nn.Module) -> None:
    """Refuse loops over the experts that a step happens to have. Raises UnsupportedModelError."""
    if any(config._experts_implementation == "eager" for config in _configs_of_odd(model)):
        raise UnsupportedModelError(
            f"{type(model).__name__} has experts whose rows are no multiple of {ALIGNMENT_BYTES} "
            "bytes: they are computed one after the other, which is no graph: run it without "
            "compile"
        )


def _configs_of_odd(model: torch.nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if hasattr(module, "has_gate") and hasattr(module, "config") and _is_odd(module):
            yield module.config


def _is_odd(experts: torch.nn.Module) -> bool:
    """Whether rows of inputs or weights, of which each is as long as one side of a matrix, do not
    begin at multiples of ALIGNMENT_BYTES."""
    return any(
        size * weight.element_size() % ALIGNMENT_BYTES
        for weight in experts.parameters(recurse=False)
        if weight.dim() == 3  # an expert's matrix each
        for size in weight.shape[1:]
    )
