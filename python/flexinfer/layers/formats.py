"""Which format a weight takes on this CPU, and layers made of other layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from flexinfer.layers import host_linear
from flexinfer.layers.host_linear import HostLinear
from flexinfer.layers.linear import Linear, PlainLinear, WeightFormat
from flexinfer.layers.onednn_linear import OneDnnLinear, can_pack

FORMATS: dict[WeightFormat, type[Linear]] = {
    WeightFormat.PLAIN: PlainLinear,
    WeightFormat.ONEDNN: OneDnnLinear,
    WeightFormat.HOST: HostLinear,
}

_is_plain: ContextVar[bool] = ContextVar("_is_plain", default=False)


@contextmanager
def staying_plain(is_plain: bool = True) -> Iterator[None]:
    """Layers that are made meanwhile keep their weights in torch's order, to be laid out later; or
    do not, while others do."""
    token = _is_plain.set(is_plain)
    try:
        yield
    finally:
        _is_plain.reset(token)


def best_format(weight: torch.Tensor) -> WeightFormat:
    """The fastest here for a weight [out_features, in_features]; plain while layers stay so."""
    if _is_plain.get():
        return WeightFormat.PLAIN
    if host_linear.supports(weight):
        return WeightFormat.HOST
    # In float32 MKL does as well on plain weights.
    is_better = weight.dtype == torch.bfloat16 and can_pack(weight.dtype, weight.device)
    return WeightFormat.ONEDNN if is_better else WeightFormat.PLAIN


def make_linear(*linears: Any, weight_format: WeightFormat | None = None) -> Linear:
    """One layer whose output is theirs, one after the other. linears: torch.nn.Linear or Conv1D;
    weight_format: None is `best_format`."""
    weights = [weight_of(linear) for linear in linears]
    weight = weights[0] if len(weights) == 1 else torch.cat([w.detach() for w in weights])
    linear = FORMATS[weight_format or best_format(weight)](weight, joined_bias(linears))
    if _is_plain.get() and isinstance(linear, PlainLinear):
        linear.parts = linears
    return linear


def make_fastest(linears: Sequence[Any]) -> Linear:
    """`make_linear` in the fastest format, while other layers stay plain too."""
    with staying_plain(False):
        return make_linear(*linears)


def joined_bias(linears: Sequence[Any]) -> torch.Tensor | None:
    """Of their outputs, one after the other, zeros where one has none; None: no one has any."""
    known = next((linear.bias for linear in linears if linear.bias is not None), None)
    if known is None or len(linears) == 1:
        return known
    biases = [
        known.new_zeros(len(weight_of(part))) if part.bias is None else part.bias
        for part in linears
    ]
    return torch.cat(biases).detach()


def is_linear(module: Any) -> bool:
    """Whether the module is a linear layer of torch's or transformers', and nothing besides."""
    from transformers.pytorch_utils import Conv1D

    return type(module) in (torch.nn.Linear, Conv1D)


def weight_of(linear: Any) -> torch.Tensor:
    """[out_features, in_features]"""
    weight: torch.Tensor = linear.weight
    return weight if type(linear) is torch.nn.Linear else weight.t()
