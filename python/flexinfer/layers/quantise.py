"""Quantised linear layers: each becomes one when it has been fused, so that no more than one layer
is held beside the quantised ones.

What is fused is proved equal to what it replaces with the weights as they are (`trial.py`), joined
in torch's own order; then its linear layers become `QuantisedLinear`, by a scheme, or with the
integers that a checkpoint has (`stored`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

import torch

from flexinfer.layers.expert_layout import layout_of
from flexinfer.layers.formats import is_linear, joined_bias, make_fastest, weight_of
from flexinfer.layers.joined_linear import JoinedLinear
from flexinfer.layers.linear import Linear, PlainLinear
from flexinfer.layers.quantised import QuantisedWeight, Scheme, TensorKind
from flexinfer.layers.quantised_linear import DTYPES_OF_INPUTS, QuantisedLinear
from flexinfer.layers.quantised_rows import join

ROUTER = "router"
ROUTERS = ("gate", ROUTER, "wg")
"""Layers of these names choose experts, and so do those of a module of the second (Gemma 4's
`router.proj`): they are tiny, and a wrong choice is a large error."""
MIXER = "altup"
"""Layers of a module of this name mix the few states of a token (Gemma 3n's): no group has as few
inputs, and llama.cpp leaves them as they are, too."""
HEAD = Scheme(8, 0, byte_inputs=True)
"""Of the layer that gives logits: with 4 bits they would be the worst of all errors."""


def store(linear: Any, source: QuantisedWeight) -> None:
    """Note what the weight of a torch.nn.Linear is in its checkpoint."""
    linear.stored_weight = source


def stored(linear: Any) -> QuantisedWeight | None:
    """What `store` noted."""
    source: QuantisedWeight | None = getattr(linear, "stored_weight", None)
    return source


def lay_out(linear: Any, scheme: Scheme | None) -> Linear:
    """A linear layer in its last form: with the integers of its checkpoint, or quantised by the
    scheme, or in the fastest format. linear: torch.nn.Linear, Conv1D or `PlainLinear`, whose weight
    may go afterwards; where integers are stored it is not read."""
    is_plain = isinstance(linear, PlainLinear)
    parts = (linear.parts if is_plain else ()) or (linear,)
    if scheme is not None and all(stored(part) is None for part in parts):
        weight = (linear.weight if is_plain else weight_of(linear)).detach()
        return QuantisedLinear(scheme.quantise(weight), linear.bias, weight.dtype)
    layers: list[Linear] = []
    for is_stored, group in groupby(parts, _kind):
        linears = list(group)
        layers.append(_of_one_kind(linears) if is_stored else make_fastest(linears))
    return layers[0] if len(layers) == 1 else JoinedLinear(layers)


def _kind(linear: Any) -> TensorKind | None:
    source = stored(linear)
    return None if source is None else source.kind


def _of_one_kind(linears: list[Any]) -> QuantisedLinear:
    """Of linear layers with integers of one kind, one after the other."""
    source = join([s for linear in linears if (s := stored(linear)) is not None])
    return QuantisedLinear(source, joined_bias(linears), linears[0].weight.dtype)


def lay_out_parts(module: torch.nn.Module, scheme: Scheme | None) -> None:
    """`lay_out` for the linear layers of a fused module, in place, one by one."""
    names = [name for name, part in module.named_modules() if isinstance(part, PlainLinear)]
    for name in names:
        module.set_submodule(name, lay_out(module.get_submodule(name), scheme))


def head_of(model: torch.nn.Module) -> torch.nn.Module | None:
    """The layer that gives a model's logits."""
    find = getattr(model, "get_output_embeddings", None)
    head: torch.nn.Module | None = None if find is None else find()
    return head


def stays(path: str) -> bool:
    """Whether the linear layer at this path is never quantised: see ROUTERS and MIXER."""
    *_, owner, name = ("", *path.split("."))
    return name in ROUTERS or owner in (ROUTER, MIXER)


def scheme_of(path: str, module: Any, scheme: Scheme, is_head: bool) -> Scheme | None:
    """How a linear layer that stands alone is quantised. None: not at all."""
    if not is_linear(module) or stays(path):
        return None
    return HEAD if is_head else scheme


def quantisable(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Path and layer of each that will be quantised."""
    for path, module in model.named_modules():
        if is_linear(module) and not stays(path):
            yield path, module


def check_scheme(
    model: torch.nn.Module, scheme: Scheme, dtype: torch.dtype, num_parts: Callable[[str], int]
) -> None:
    """Raises ValueError where a layer of the model, which may be without weights, does not fit.
    num_parts: among how many ranks the inputs of a layer are divided."""
    if dtype not in DTYPES_OF_INPUTS:
        raise ValueError(
            f"layers with quantised weights compute in float32 or bfloat16, not in {dtype}: "
            "set dtype to one of them"
        )
    head = head_of(model)
    for name, module in quantisable(model):
        own = scheme_of(name, module, scheme, module is head)
        if own is not None:
            _check_depth(name, weight_of(module).shape[1], num_parts(name), own)
    for path, module in model.named_modules():
        layout = layout_of(module)
        if layout is not None:
            _, width, hidden = layout.sizes(module)
            for part, depth in zip(layout.weight_names, (width, hidden), strict=True):
                name = f"{path}.{part}"
                _check_depth(name, depth, num_parts(name), scheme)


def _check_depth(name: str, depth: int, num_ranks: int, scheme: Scheme) -> None:
    if not scheme.fits(depth // num_ranks):
        of_whom = "" if num_ranks == 1 else f" on each of {num_ranks} ranks"
        advice = ": choose another group size, or int8" if scheme.group else ""
        raise ValueError(
            f"{name} has {depth // num_ranks} inputs{of_whom}, which is no multiple of "
            f"{scheme.group or 4}{advice}"
        )
