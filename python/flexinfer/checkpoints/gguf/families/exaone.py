"""EXAONE 4: norms of queries and keys, and behind; layers without windows are not rotated."""

from __future__ import annotations

from typing import Any

from flexinfer.checkpoints.gguf.architecture import Architecture
from flexinfer.checkpoints.gguf.families.llama import NORMS_BEHIND
from flexinfer.checkpoints.gguf.rope import WINDOW, WINDOW_PATTERN, windows_of
from flexinfer.checkpoints.gguf.values import GgufValues

LAYERS_OF_LARGEST = 64


def _settings(values: GgufValues) -> dict[str, Any]:
    """Files of the largest may leave unsaid that it has windows: llama.cpp knows it by its number
    of layers."""
    num_layers = values.count("block_count")
    if values.get(WINDOW, 4096 if num_layers == LAYERS_OF_LARGEST else 0):
        return windows_of(values, 4)
    return {"sliding_window": None, "layer_types": ["full_attention"] * num_layers}


EXAONE = {
    "exaone4": Architecture(
        "Exaone4Config",
        names=NORMS_BEHIND,
        keys=frozenset({WINDOW, WINDOW_PATTERN}),
        settings=_settings,
    )
}
