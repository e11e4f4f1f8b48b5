"""Mistral: as Llama; Ministral 3 scales queries by their position."""

from __future__ import annotations

from typing import Any

from flexinfer.checkpoints.gguf.architecture import Architecture
from flexinfer.checkpoints.gguf.conversions import part_pairs
from flexinfer.checkpoints.gguf.rope import MSCALE, ORIGINAL, rope_of
from flexinfer.checkpoints.gguf.values import GgufValues

TEMPERATURE = "attention.temperature_scale"


def _config(values: GgufValues) -> str:
    """Mistral Small has files of this name too."""
    return "Ministral3Config" if values.get(TEMPERATURE) else "MistralConfig"


def _settings(values: GgufValues) -> dict[str, Any]:
    """Queries grow by the logarithm of how many original lengths lie in front of them. By how much
    yarn multiplies scores, two numbers of the config say; the file has the second, and the first is
    1, as llama.cpp takes it."""
    settings: dict[str, Any] = {"sliding_window": None}
    rope = rope_of(values)
    if rope["rope_type"] == "yarn" and values.get(MSCALE):
        rope |= {"mscale": 1.0, "mscale_all_dim": values.factor(MSCALE)}
    if values.get(TEMPERATURE):
        rope["llama_4_scaling_beta"] = values.factor(TEMPERATURE)
        rope["original_max_position_embeddings"] = values.count(ORIGINAL)
    return settings | {"rope_parameters": rope}


MISTRAL = {
    "mistral3": Architecture(
        _config,
        conversions=(part_pairs,),
        keys=frozenset({TEMPERATURE, MSCALE}),
        settings=_settings,
    )
}
