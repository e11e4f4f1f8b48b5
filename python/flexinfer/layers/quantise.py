"""Quantising a model's linear layers: each when it has been fused, so that no more than one layer
is held beside the quantised ones.

What is fused is proved equal to what it replaces with the weights as they are (`trial.py`), joined
in torch's own order; then its linear layers become `QuantisedLinear`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from flexinfer.layers.formats import is_linear, weight_of
from flexinfer.layers.linear import PlainLinear
from flexinfer.layers.quantised import Scheme
from flexinfer.layers.quantised_linear import DTYPES_OF_INPUTS, QuantisedLinear

ROUTERS = ("gate", "router")
"""Layers of these names choose experts: they are tiny, and a wrong choice is a large error."""
HEAD = Scheme(8, 0)
"""Of the layer that gives logits: with 4 bits they would be the worst of all errors."""


def quantise_linear(linear: Any, scheme: Scheme) -> QuantisedLinear:
    """linear: torch.nn.Linear, Conv1D or `PlainLinear`, whose weight may go afterwards."""
    weight = linear.weight if isinstance(linear, PlainLinear) else weight_of(linear)
    source = scheme.quantise(weight.detach())
    return QuantisedLinear(source, linear.bias, weight.dtype)


def quantise_parts(module: torch.nn.Module, scheme: Scheme) -> None:
    """Quantise the linear layers of a fused module, in place, one by one."""
    names = [name for name, part in module.named_modules() if isinstance(part, PlainLinear)]
    for name in names:
        module.set_submodule(name, quantise_linear(module.get_submodule(name), scheme))


def scheme_of(name: str, module: torch.nn.Module, scheme: Scheme) -> Scheme | None:
    """How a linear layer that stands alone is quantised; name: its last one. None: not at all."""
    if not is_linear(module) or name in ROUTERS:
        return None
    return HEAD if name == "lm_head" else scheme


def quantisable(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and layer of each that will be quantised."""
    for name, module in model.named_modules():
        if is_linear(module) and name.rpartition(".")[2] not in ROUTERS:
            yield name, module


def check_scheme(model: torch.nn.Module, scheme: Scheme, dtype: torch.dtype) -> None:
    """Raises ValueError where a layer of the model, which may be without weights, does not fit."""
    if dtype not in DTYPES_OF_INPUTS:
        raise ValueError(
            f"layers with quantised weights compute in float32 or bfloat16, not in {dtype}: "
            "set dtype to one of them"
        )
    for name, module in quantisable(model):
        depth = weight_of(module).shape[1]
        own = scheme_of(name.rpartition(".")[2], module, scheme)
        if own is not None and not own.fits(depth):
            step = own.group or 4
            raise ValueError(
                f"{name} has {depth} inputs, which is no multiple of {step}: choose another "
                "group size, or int8"
                if own.group
                else f"{name} has {depth} inputs, which is no multiple of {step}"
            )
