"""Granite: as Llama, with factors; and with experts of which one may be shared."""

from __future__ import annotations

from typing import Any

import torch

from flexinfer.checkpoints.gguf.architecture import Architecture
from flexinfer.checkpoints.gguf.conversions import part_pairs
from flexinfer.checkpoints.gguf.experts import SHARED_WIDTH
from flexinfer.checkpoints.gguf.sources import Changed, Source, Stacked
from flexinfer.checkpoints.gguf.values import GgufValues
from flexinfer.errors import UnsupportedModelError

FACTORS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
"""Keys -> names of the config."""
HALVES = ("shared_mlp.gate_proj.weight", "shared_mlp.up_proj.weight")
WHOLE = "shared_mlp.input_linear.weight"
ROUTED = "block_sparse_moe"
NAMES = {
    "ffn_gate_inp": f"{ROUTED}.router",
    "ffn_gate_shexp.weight": HALVES[0],
    "ffn_up_shexp.weight": HALVES[1],
    "ffn_down_shexp": "shared_mlp.output_linear",
}


def _settings(values: GgufValues) -> dict[str, Any]:
    """A file leaves out what is 1, and the scale of scores where it is that of others. Without
    rotary embeddings, as some are, transformers has no such model."""
    if values.get("rope.scaling.finetuned", True) is False:
        values.refuse("rope.scaling.finetuned", "true")
    width, heads = values.count("embedding_length"), values.count("attention.head_count")
    usual = {"attention.scale": values.count("attention.key_length", width // heads) ** -0.5}
    return {name: values.factor(key, usual.get(key, 1.0)) for key, name in FACTORS.items()}


def _has_shared(values: GgufValues) -> bool:
    return bool(values.get(SHARED_WIDTH))


def _with_experts(values: GgufValues) -> dict[str, Any]:
    settings = _settings(values)
    if _has_shared(values):
        settings["shared_intermediate_size"] = values.count(SHARED_WIDTH)
    return settings


def _join_shared(sources: dict[str, Source], config: Any) -> None:
    """Gates and what they multiply are one weight in the model."""
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        halves = [sources.pop(prefix + half) for half in HALVES if prefix + half in sources]
        if not halves:
            continue
        shapes = {half.shape for half in halves}
        if len(halves) < 2 or len(shapes) > 1:
            raise UnsupportedModelError(
                f"it has {prefix}{WHOLE} in {len(halves)} halves "
                f"{' and '.join(map(str, map(list, shapes)))}; there have to be two of one shape"
            )
        rows, width = halves[0].shape
        if len({half.type for half in halves}) == 1:
            whole: Source = Stacked(*halves)
        else:
            whole = Changed(_stacked, *halves, shape=(2 * rows, width))
        sources[prefix + WHOLE] = whole


def _stacked(gates: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    return torch.cat([gates, factors.to(gates.dtype)])


GRANITE = {
    "granite": Architecture(
        "GraniteConfig", conversions=(part_pairs,), keys=frozenset(FACTORS), settings=_settings
    ),
    "granitemoe": Architecture(
        None,
        experts_config=lambda values: (
            "GraniteMoeSharedConfig" if _has_shared(values) else "GraniteMoeConfig"
        ),
        conversions=(part_pairs, _join_shared),
        experts=f"{ROUTED}.experts",
        names=NAMES,
        keys=frozenset({*FACTORS, SHARED_WIDTH}),
        settings=_with_experts,
    ),
}
