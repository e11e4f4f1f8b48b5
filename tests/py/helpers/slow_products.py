"""Models whose quantised products are computed as their definition says, slowly."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from flexinfer.layers.quantise import quantisable, scheme_of
from flexinfer.layers.quantised import Scheme
from helpers.tiny_models import make_model

SPLIT_INPUTS = ("o_proj", "down_proj")
"""Layers of whose inputs each rank has a part."""


class SlowLinear(torch.nn.Module):
    """A linear layer whose weight was quantised in parts, each with inputs of its own."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, scheme: Scheme, num_parts: int
    ) -> None:
        super().__init__()
        self.sources = [scheme.quantise(part) for part in weight.chunk(num_parts, dim=1)]
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.chunk(len(self.sources), dim=-1)
        product = sum(s.reference(part) for s, part in zip(self.sources, parts, strict=True))
        return (product if self.bias is None else product + self.bias).to(x.dtype)  # type: ignore[union-attr]


def slow_model(name: str, scheme: Scheme, num_ranks: int = 1) -> Any:
    """transformers' own modules around slow products with the same integers."""
    model = copy.deepcopy(make_model(name))
    for path, linear in list(quantisable(model)):
        own = scheme_of(path.rpartition(".")[2], linear, scheme)
        assert own is not None
        weight = linear.weight.detach()
        weight = weight if isinstance(linear, torch.nn.Linear) else weight.t()
        num_parts = num_ranks if path.endswith(SPLIT_INPUTS) else 1
        model.set_submodule(path, SlowLinear(weight, linear.bias, own, num_parts))
    return model


@torch.inference_mode()
def furthest_behind(model: Any, prompt: list[int], generated: Sequence[int]) -> float:
    """How far the worst of these tokens is from being the model's first choice, in standard
    deviations of its logits; 0: all are."""
    tokens = list(generated)
    logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    behind = logits.amax(dim=1) - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return float(behind.max() / logits.std())
