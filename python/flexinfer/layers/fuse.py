"""Parts of a transformers model replaced by ones that compute the same in fewer calls.

One pass from the top: a module whose code is known (`recognise.py`, `known.py`) is replaced if the
replacement gives the same in a trial; otherwise its children are looked at. What is not known stays
as it is; so does everything on a GPU.

| part | becomes | calls |
|---|---|---|
| decoder layer of Llama's kind, its parts known | `FusedDecoderLayer` | no additions |
| attention: q, k, v, rotary embedding, o | `FusedAttention` | one product for three, one pass |
| gated MLP | `GatedMLP` | 3 for 5 |
| RMSNorm | `RMSNorm` | 1 for 6 |
| torch.nn.Linear, Conv1D | `Linear` in the best format | |
| all of them, where weights are quantised | `QuantisedLinear` | |

In a compiled model they are operators that the compiler does not look into (`operators.py`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from flexinfer.attention.latent import latent_of
from flexinfer.layers.attention import fuse_attention, run_attention, run_decoder_layer
from flexinfer.layers.decoder import fuse_decoder_layer
from flexinfer.layers.formats import (
    best_format,
    is_linear,
    make_linear,
    staying_plain,
    weight_of,
)
from flexinfer.layers.linear import Linear, WeightFormat
from flexinfer.layers.mlp import fuse_mlp
from flexinfer.layers.norm import fuse_norm
from flexinfer.layers.quantise import quantise_linear, quantise_parts, scheme_of
from flexinfer.layers.quantised import Scheme
from flexinfer.layers.recognise import is_watched
from flexinfer.layers.trial import Run, computes_the_same
from flexinfer.runtime.weight_files import drop_pages

logger = logging.getLogger(__name__)


class Rule(NamedTuple):
    """One kind of module that can be replaced."""

    fuse: Callable[[Any], torch.nn.Module | None]
    """The replacement of a module whose code is known; None: not of this kind."""
    weight: Callable[[Any], torch.Tensor]
    """Of the replacement: a weight whose dtype is that of the input."""
    width: Callable[[Any], int]
    """Of the replacement's input."""
    run: Run = lambda module, x: module(x)
    """How the trial calls both."""


def fuse_linear(module: Any) -> Linear | None:
    """What may take the module's place; None: torch is as fast."""
    if not is_linear(module) or is_watched(module):
        return None
    return None if best_format(weight_of(module)) is WeightFormat.PLAIN else make_linear(module)


RULES = (
    Rule(fuse_linear, lambda linear: linear.weight, lambda linear: linear.in_features),
    Rule(
        fuse_decoder_layer,
        lambda layer: layer.self_attn.o_proj.weight,
        lambda layer: layer.self_attn.o_proj.out_features,
        run_decoder_layer,
    ),
    Rule(
        fuse_attention,
        lambda attention: attention.o_proj.weight,
        lambda attention: attention.qkv_proj.in_features,
        run_attention,
    ),
    Rule(fuse_mlp, lambda mlp: mlp.down_proj.weight, lambda mlp: mlp.gate_up_proj.in_features),
    Rule(fuse_norm, lambda norm: norm.weight, lambda norm: norm.weight.shape[0]),
)


def fuse_layers(model: torch.nn.Module, scheme: Scheme | None = None) -> dict[str, int]:
    """Replace what can be replaced, and tell how many of each class there are then. The model is
    not for training any more. scheme: linear layers are quantised, each when it has been fused."""
    uses = Counter(
        parameter.data_ptr()
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )
    uses.update(
        latent.weight.data_ptr() for module in model.modules() if (latent := latent_of(module))
    )
    counts: Counter[str] = Counter()
    with staying_plain() if scheme is not None else nullcontext():
        _fuse_children(model, uses, counts, scheme)
    logger.debug("fused layers: %s", dict(counts))
    return dict(counts)


def _fuse_children(
    parent: torch.nn.Module, uses: Counter[int], counts: Counter[str], scheme: Scheme | None
) -> None:
    # By name, one by one: a list of the children would keep the weights of those replaced.
    for name in [name for name, _ in parent.named_children()]:
        child = parent.get_submodule(name)
        replacement = _quantised(name, child, uses, scheme)
        if replacement is None:
            _fuse_children(child, uses, counts, scheme)
            continue
        setattr(parent, name, replacement)
        kept = {weight.data_ptr() for weight in replacement.parameters()}
        drop_pages(
            w for w in child.parameters() if w.data_ptr() not in kept and uses[w.data_ptr()] == 1
        )
        counts[type(replacement).__name__] += 1


def _quantised(
    name: str, module: torch.nn.Module, uses: Counter[int], scheme: Scheme | None
) -> torch.nn.Module | None:
    """What takes the module's place, quantised where there is a scheme. A head that is tied to the
    embedding then gets a weight of its own; others that something else uses stay as they are. A
    linear layer needs no trial, as its code is torch's own."""
    if scheme is None:
        return _fused(module, uses)
    own = None if is_watched(module) else scheme_of(name, module, scheme)
    is_used_elsewhere = any(uses[weight.data_ptr()] > 1 for weight in module.parameters())
    if own is not None and (name == "lm_head" or not is_used_elsewhere):
        return quantise_linear(module, own)
    replacement = _fused(module, uses)
    if replacement is not None:
        quantise_parts(replacement, scheme)
    return replacement


def _fused(module: torch.nn.Module, uses: Counter[int]) -> torch.nn.Module | None:
    """What takes the module's place: None where it is unknown or computes otherwise. Weights that
    something else uses too, such as a head tied to the embedding, stay as they are."""
    if any(uses[weight.data_ptr()] > 1 for weight in module.parameters()):
        return None
    for rule in RULES:
        replacement = rule.fuse(module)
        if replacement is not None:
            dtype, width = rule.weight(replacement).dtype, rule.width(replacement)
            is_same = computes_the_same(module, replacement, width, dtype, rule.run)
            return replacement if is_same else None
    return None
