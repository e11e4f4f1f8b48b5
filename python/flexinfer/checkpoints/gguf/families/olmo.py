"""OLMo 2, and OLMo 3, whose files have the same name: with windows."""

from __future__ import annotations

from typing import Any

from flexinfer.checkpoints.gguf.architecture import Architecture
from flexinfer.checkpoints.gguf.families.llama import NORMS_BEHIND
from flexinfer.checkpoints.gguf.rope import (
    SCORE_FACTOR,
    WINDOW,
    WINDOW_BASE,
    WINDOW_PATTERN,
    rope_of_kinds,
    windows_of,
)
from flexinfer.checkpoints.gguf.values import GgufValues


def _config(values: GgufValues) -> str:
    return "Olmo3Config" if values.get(WINDOW) else "Olmo2Config"


def _settings(values: GgufValues) -> dict[str, Any]:
    if not values.get(WINDOW):
        return {}
    return {**windows_of(values, 4), "rope_parameters": rope_of_kinds(values)}


OLMO = {
    "olmo2": Architecture(
        _config,
        names=NORMS_BEHIND,
        keys=frozenset({WINDOW, WINDOW_BASE, WINDOW_PATTERN, SCORE_FACTOR}),
        settings=_settings,
    )
}
