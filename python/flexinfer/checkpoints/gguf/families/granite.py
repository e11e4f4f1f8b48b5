"""Granite: as Llama, with factors; Granite SWA with windows, sinks and layers without rotation."""

from __future__ import annotations

from typing import Any

from flexinfer.checkpoints.gguf.architecture import Architecture
from flexinfer.checkpoints.gguf.conversions import part_pairs
from flexinfer.checkpoints.gguf.rope import WINDOW, WINDOW_PATTERN, rope_of, windows_of
from flexinfer.checkpoints.gguf.values import GgufValues

ROTATES = "attention.rope_pattern"
FACTORS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
"""Keys -> names of the config."""


def _settings(values: GgufValues) -> dict[str, Any]:
    """A file leaves out what is 1, and the scale of scores where it is that of others. Without
    rotary embeddings, as some are, transformers has no such model."""
    if values.get("rope.scaling.finetuned", True) is False:
        values.refuse("rope.scaling.finetuned", "true")
    width, heads = values.count("embedding_length"), values.count("attention.head_count")
    usual = {"attention.scale": values.count("attention.key_length", width // heads) ** -0.5}
    return {name: values.factor(key, usual.get(key, 1.0)) for key, name in FACTORS.items()}


def _with_windows(values: GgufValues) -> dict[str, Any]:
    """A base of 0 is that of a layer that is not rotated."""
    settings, layers = _settings(values), range(values.count("block_count"))
    if values.of_layers(WINDOW_PATTERN) is None:
        values.refuse(WINDOW_PATTERN, "one for each layer")
    rotates = values.of_layers(ROTATES) or [True for _ in layers]
    if len(rotates) != len(layers):
        values.refuse(ROTATES, f"one for each of {len(layers)} layers")
    values.need(WINDOW)
    base = rope_of(values)["rope_theta"]
    bases = [base if is_rotated else 0.0 for is_rotated in rotates]
    return {**settings, **windows_of(values, 1), "layer_rope_theta": bases}


GRANITE = {
    "granite_swa": Architecture(
        "GraniteSWAConfig",
        conversions=(part_pairs,),
        names={"attn_sinks.weight": "self_attn.sinks"},
        keys=frozenset({*FACTORS, WINDOW, WINDOW_PATTERN, ROTATES}),
        settings=_with_windows,
    ),
    "granite": Architecture(
        "GraniteConfig", conversions=(part_pairs,), keys=frozenset(FACTORS), settings=_settings
    ),
}
