"""OLMo, OLMo 2, and OLMo 3, whose files have the second's name: with windows."""

from __future__ import annotations

from math import isclose
from typing import Any

from flexinfer.checkpoints.gguf.architecture import Architecture
from flexinfer.checkpoints.gguf.conversions import part_pairs
from flexinfer.checkpoints.gguf.families.layer_norm import EPSILON, NORM_KEYS
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

CLAMP = "attention.clamp_kqv"
ONLY_EPSILON = 1e-5


def _olmo(values: GgufValues) -> dict[str, Any]:
    """Norms without weights, of which transformers has one epsilon."""
    if not isclose(values.factor(EPSILON), ONLY_EPSILON, rel_tol=1e-6):
        values.refuse(EPSILON, f"only {ONLY_EPSILON}")
    return {"clip_qkv": values.factor(CLAMP) if values.get(CLAMP) else None}


def _config(values: GgufValues) -> str:
    return "Olmo3Config" if values.get(WINDOW) else "Olmo2Config"


def _settings(values: GgufValues) -> dict[str, Any]:
    if not values.get(WINDOW):
        return {}
    return {**windows_of(values, 4), "rope_parameters": rope_of_kinds(values)}


OLMO = {
    "olmo": Architecture(
        "OlmoConfig", conversions=(part_pairs,), keys=NORM_KEYS | {CLAMP}, settings=_olmo
    ),
    "olmo2": Architecture(
        _config,
        names=NORMS_BEHIND,
        keys=frozenset({WINDOW, WINDOW_BASE, WINDOW_PATTERN, SCORE_FACTOR}),
        settings=_settings,
    ),
}
