"""Phi 3 and 4: joined projections, part of a head rotated, factors for long contexts."""

from __future__ import annotations

from typing import Any

from flexinfer.checkpoints.gguf.architecture import Architecture
from flexinfer.checkpoints.gguf.rope import ORIGINAL, SCORE_FACTOR, WINDOW, partial_rope_of
from flexinfer.checkpoints.gguf.values import GgufValues

JOINED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
"""Queries, keys and values are one weight, and so are gates and what they multiply."""
LONG_ROPE = ("rope_factors_short.weight", "rope_factors_long.weight")


def _phi3(values: GgufValues) -> dict[str, Any]:
    """As transformers has it, a window is kept to; llama.cpp reads it and attends to all. With
    factors for long contexts the first of them serve, up to the original length."""
    settings: dict[str, Any] = {
        "sliding_window": values.count(WINDOW) if values.get(WINDOW) else None
    }
    rope = partial_rope_of(values)
    short, long = (values.tensor(name) for name in LONG_ROPE)
    if (short is None) != (long is None):
        values.refuse(ORIGINAL, f"both of {' and '.join(LONG_ROPE)}, or neither")
    if short is not None and long is not None:
        original = values.count(ORIGINAL)
        settings["original_max_position_embeddings"] = original
        rope |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        rope |= {"original_max_position_embeddings": original}
        if values.get(SCORE_FACTOR) is not None:
            rope["attention_factor"] = values.factor(SCORE_FACTOR)
    return settings | {"rope_parameters": rope}


PHI = {
    "phi3": Architecture(
        "Phi3Config",
        names=JOINED,
        keys=frozenset({WINDOW, SCORE_FACTOR}),
        tensors=frozenset(LONG_ROPE),
        settings=_phi3,
        rotates_all=False,
    )
}
