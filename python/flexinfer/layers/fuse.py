"""Parts of a transformers model replaced by ones that compute the same in fewer calls.

One pass from the top: a module whose code is known (`recognise.py`, `known.py`) is replaced if the
replacement gives the same in a trial; otherwise its children are looked at. What is not known stays
as it is; so does everything on a GPU.

| part | becomes | calls |
|---|---|---|
| decoder layer of Llama's kind, its parts known | `FusedDecoderLayer` | no additions |
| the same with an MLP of another kind, its attention known | `FusedDecoderLayer` | one addition |
| decoder layer of Gemma 3's kind, its parts known | `SandwichLayer` | 1 up to 48 rows |
| attention: q, k, v, rotary embedding, o | `FusedAttention` | one product for three, one pass |
| gated MLP | `GatedMLP` | 3 for 5 |
| experts: the gated MLPs of a mixture | `Experts` | 1 for 15 |
| RMSNorm | `RMSNorm` | 1 for 6 |
| torch.nn.Linear, Conv1D | `Linear` in the best format | |
| a head and the embedding that it is tied to | `HostLinear`, `PanelEmbedding` | |
| a weight by which code multiplies itself: of routers | `RowwiseWeight` | |
| linear layers, where weights are quantised | `QuantisedLinear` | |
| an embedding that such a head is tied to | `QuantisedEmbedding` | |

In a compiled model they are operators that the compiler does not look into (`operators.py`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from flexinfer.attention.latent import latent_of
from flexinfer.layers.attention import fuse_attention, run_attention, run_decoder_layer
from flexinfer.layers.decoder import FusedDecoderLayer, fuse_around_mlp, fuse_decoder_layer
from flexinfer.layers.formats import (
    best_format,
    is_linear,
    make_linear,
    staying_plain,
    weight_of,
)
from flexinfer.layers.fuse_experts import (
    fuse_experts,
    is_experts,
    is_for_kernel,
    is_stored,
    lay_out_if_the_same,
    read_all,
    run_experts,
)
from flexinfer.layers.known import NEWEST_TRANSFORMERS
from flexinfer.layers.linear import Linear, WeightFormat
from flexinfer.layers.mlp import fuse_mlp
from flexinfer.layers.norm import fuse_norm
from flexinfer.layers.quantise import head_of, lay_out, lay_out_parts, scheme_of, stored
from flexinfer.layers.quantised import Scheme
from flexinfer.layers.recognise import is_watched, weights_read_by
from flexinfer.layers.rowwise_weight import make_rowwise
from flexinfer.layers.tied_head import find_ties, fuse_tied_heads
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
    Rule(fuse_experts, lambda experts: experts.weight, lambda experts: experts.width, run_experts),
    Rule(fuse_norm, lambda norm: norm.weight, lambda norm: norm.weight.shape[0]),
)


Fill = Callable[[str], None]
"""(path of a module) -> reads its weights, unless they are there."""


@dataclass(frozen=True, slots=True)
class _Fusing:
    """One pass over a model."""

    model: torch.nn.Module
    scheme: Scheme | None
    fill: Fill | None
    uses: Counter[int]
    """How many parameters lie at an address."""
    head: int
    """The id of the layer that gives the logits: the layer itself would keep its weight."""
    counts: Counter[str] = field(default_factory=Counter)


def fuse_layers(
    model: torch.nn.Module, scheme: Scheme | None = None, fill: Fill | None = None
) -> dict[str, int]:
    """Replace what can be replaced, and tell how many of each class there are then. The model is
    not for training any more. scheme: linear layers are quantised, each when it has been fused.
    fill: the model has no weights yet, and gets those of a module when its turn comes."""
    fusing = _Fusing(model, scheme, fill, Counter(), id(head_of(model)))
    if fill is None:
        _count_uses(fusing)
    ties = find_ties(model)
    is_later = scheme is not None or fill is not None
    with staying_plain() if is_later else nullcontext():
        _fuse_children(fusing, "")
        _fuse_around_mlps(fusing)
    fusing.counts.update(fuse_tied_heads(model, ties))
    _count_uses(fusing)
    make_rowwise(model, fusing.uses)
    if scheme is not None:
        _warn_of_other_experts(model)
    if all(parameter.device.type == "cpu" for parameter in model.parameters()):
        _warn_of_newer_transformers(fusing.counts)
    logger.debug("fused layers: %s", dict(fusing.counts))
    return dict(fusing.counts)


def _warn_of_newer_transformers(counts: Counter[str]) -> None:
    """Nothing is wrong then, but much may be slower."""
    import transformers

    release = tuple(int(number) for number in transformers.__version__.split(".")[:2])
    is_fused = any(
        counts[name] for name in ("FusedDecoderLayer", "SandwichLayer", "FusedAttention")
    )
    if release > NEWEST_TRANSFORMERS and not is_fused:
        newest = ".".join(map(str, NEWEST_TRANSFORMERS))
        logger.warning(
            "transformers %s is newer than %s, the newest whose attention is known here: the "
            "model's is computed as it stands there, which is right but may be slower; see whether "
            "flexinfer has a newer version, or: pip install 'transformers==%s.*'",
            transformers.__version__,
            newest,
            newest,
        )


def _fuse_around_mlps(fusing: _Fusing) -> None:
    """Decoder layers whose MLP has stayed, or has become something else than a gated one."""
    for path, module in list(fusing.model.named_modules()):
        replacement = fuse_around_mlp(module)
        if replacement is None or not _is_same_around_mlp(module, replacement):
            continue
        fusing.model.set_submodule(path, replacement)
        fusing.counts[type(replacement).__name__] += 1


def _is_same_around_mlp(module: Any, replacement: FusedDecoderLayer) -> bool:
    """In a trial without the MLP, which is the same in both: of a mixture, another rounding before
    it may choose other experts."""
    mlp, o_proj = replacement.mlp, replacement.self_attn.o_proj
    weight: Any = o_proj.weight
    module.mlp = replacement.mlp = (
        _WithScores() if replacement.tells_scores else torch.nn.Identity()
    )
    try:
        width = o_proj.out_features
        return computes_the_same(module, replacement, width, weight.dtype, run_decoder_layer)
    finally:
        module.mlp = replacement.mlp = mlp


class _WithScores(torch.nn.Module):
    """What stands in a trial for an MLP that tells something else, too."""

    def forward(self, x: torch.Tensor) -> Any:
        return x, None


def _warn_of_other_experts(model: torch.nn.Module) -> None:
    """Most of a mixture's weights are its experts': who asked for small ones should know."""
    kinds = {
        type(module).__name__
        for module in model.modules()
        if "experts" in type(module).__name__.lower() and list(module.parameters(recurse=False))
    }
    if kinds:
        logger.warning(
            "experts of a kind that is not known stay as they are, not quantised: %s",
            ", ".join(sorted(kinds)),
        )


def _count_uses(fusing: _Fusing) -> None:
    """Anew: where a weight was that is gone, there may be another one."""
    fusing.uses.clear()
    for part in fusing.model.modules():
        weights: list[torch.Tensor] = [w for w in part.parameters(False) if not w.is_meta]
        if (latent := latent_of(part)) is not None:
            weights.append(latent.weight)
        fusing.uses.update(weight.data_ptr() for weight in weights)


def _fuse_children(fusing: _Fusing, path: str) -> None:
    parent = fusing.model.get_submodule(path)
    read_by_parent = weights_read_by(parent)
    # By name, one by one: a list of the children would keep the weights of those replaced.
    for name in [name for name, _ in parent.named_children()]:
        child_path = f"{path}.{name}" if path else name
        if fusing.fill is not None and _has_empty(parent.get_submodule(name)):
            fusing.fill(child_path)
            _count_uses(fusing)
        child = parent.get_submodule(name)
        is_read = is_linear(child) and name in read_by_parent
        replacement = None if is_read else _replacement(fusing, child_path, child)
        if replacement is None:
            _fuse_children(fusing, child_path)
            continue
        setattr(parent, name, replacement)
        if fusing.fill is None:
            kept = {weight.data_ptr() for weight in replacement.parameters()}
            weights = [w for w in child.parameters() if w.data_ptr() not in kept]
            drop_pages(w for w in weights if fusing.uses[w.data_ptr()] == 1)
        fusing.counts[type(replacement).__name__] += 1


def _has_empty(module: torch.nn.Module) -> bool:
    return any(parameter.is_meta for parameter in module.parameters())


def _replacement(fusing: _Fusing, path: str, module: torch.nn.Module) -> torch.nn.Module | None:
    """What takes the module's place, quantised where it is or is to be. Weights that something else
    uses, too, stay as they are, but for a head's, whose integers the embedding may share. A linear
    layer needs no trial, as its code is torch's own."""
    uses, scheme = fusing.uses, fusing.scheme
    if scheme is None and fusing.fill is None:
        return _fused(module, uses)
    if is_linear(module) and not is_watched(module):
        is_head = id(module) == fusing.head
        own = None if scheme is None else scheme_of(path, module, scheme, is_head)
        if stored(module) is not None or (is_head and own is not None):
            return lay_out(module, own)
        is_for_us = own is not None or scheme is None
        return lay_out(module, own) if is_for_us and not _is_shared(module, uses) else None
    if is_experts(module):
        return _experts(module, uses, scheme)
    replacement = _fused(module, uses)
    if replacement is not None:
        lay_out_parts(replacement, scheme)
    return replacement


def _experts(module: Any, uses: Counter[int], scheme: Scheme | None) -> torch.nn.Module | None:
    """Experts in their last form, read one by one. None: they stay, with all their weights."""
    found = None
    if is_for_kernel(module, scheme) and not _is_shared(module, uses):
        found = lay_out_if_the_same(module, scheme)
    if found is None and is_stored(module):
        read_all(module)
    return found


def _is_shared(module: torch.nn.Module, uses: Counter[int]) -> bool:
    return any(not w.is_meta and uses[w.data_ptr()] > 1 for w in module.parameters())


def _fused(module: torch.nn.Module, uses: Counter[int]) -> torch.nn.Module | None:
    """What takes the module's place: None where it is unknown or computes otherwise. Weights that
    something else uses too, such as a head tied to the embedding, stay as they are."""
    if _is_shared(module, uses):
        return None
    for rule in RULES:
        replacement = rule.fuse(module)
        if replacement is not None:
            dtype, width = rule.weight(replacement).dtype, rule.width(replacement)
            is_same = computes_the_same(module, replacement, width, dtype, rule.run)
            return replacement if is_same else None
    return None
