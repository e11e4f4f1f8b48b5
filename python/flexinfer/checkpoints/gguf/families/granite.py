"""Granite: as Llama, with factors."""

from __future__ import annotations

from typing import Any

from flexinfer.checkpoints.gguf.architecture import Architecture
from flexinfer.checkpoints.gguf.conversions import part_pairs
from flexinfer.checkpoints.gguf.values import GgufValues

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


GRANITE = {
    "granite": Architecture(
        "GraniteConfig", conversions=(part_pairs,), keys=frozenset(FACTORS), settings=_settings
    )
}
