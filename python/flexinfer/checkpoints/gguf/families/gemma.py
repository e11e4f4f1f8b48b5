"""Gemma: norms of which one is added, soft caps, layers with windows."""

from __future__ import annotations

from typing import Any

from flexinfer.checkpoints.gguf.architecture import Architecture
from flexinfer.checkpoints.gguf.conversions import less_one
from flexinfer.checkpoints.gguf.families.llama import NORMS_BEHIND
from flexinfer.checkpoints.gguf.rope import (
    WINDOW,
    WINDOW_BASE,
    WINDOW_PATTERN,
    rope_of_kinds,
    windows_of,
)
from flexinfer.checkpoints.gguf.values import GgufValues

NORMS_ON_BOTH_SIDES = NORMS_BEHIND | {"ffn_norm": "pre_feedforward_layernorm"}
SCORE_CAP, LOGIT_CAP = "attn_logit_softcapping", "final_logit_softcapping"
OTHER_BASE = 1e4
"""By which layers with a window rotate, where the file does not say it."""


def _scale_of_queries(values: GgufValues, layers_of_largest: int) -> dict[str, Any]:
    """The largest of the models scales them by another width than that of its heads. The file does
    not say so: llama.cpp knows it by its number of layers."""
    width, heads = values.count("embedding_length"), values.count("attention.head_count")
    if values.count("block_count") == layers_of_largest:
        return {"query_pre_attn_scalar": width // heads}
    return {"query_pre_attn_scalar": values.count("attention.key_length", width // heads)}


def _gemma2(values: GgufValues) -> dict[str, Any]:
    return {
        **windows_of(values, 2),
        **_scale_of_queries(values, 46),
        "attn_logit_softcapping": values.factor(SCORE_CAP, 50.0),
        "final_logit_softcapping": values.factor(LOGIT_CAP, 30.0),
    }


def _gemma3(values: GgufValues) -> dict[str, Any]:
    """Layers with a window rotate by a base of their own, and are not stretched. A file without
    windows, or with windows of 0, has none in any layer."""
    full = {"layer_types": ["full_attention"] * values.count("block_count")}
    return {
        **(windows_of(values, 6) if values.get(WINDOW) else full),
        **_scale_of_queries(values, 62),
        "final_logit_softcapping": values.factor(LOGIT_CAP) if values.get(LOGIT_CAP) else None,
        "rope_parameters": rope_of_kinds(values, OTHER_BASE),
    }


GEMMA = {
    "gemma": Architecture("GemmaConfig", conversions=(less_one,)),
    "gemma2": Architecture(
        "Gemma2Config",
        conversions=(less_one,),
        names=NORMS_ON_BOTH_SIDES,
        keys=frozenset({WINDOW, WINDOW_PATTERN, SCORE_CAP, LOGIT_CAP}),
        settings=_gemma2,
    ),
    "gemma3": Architecture(
        "Gemma3TextConfig",
        conversions=(less_one,),
        names=NORMS_ON_BOTH_SIDES,
        keys=frozenset({WINDOW, WINDOW_PATTERN, WINDOW_BASE, LOGIT_CAP}),
        settings=_gemma3,
    ),
}
