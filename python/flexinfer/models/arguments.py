"""Arguments that transformers hands on to attention and to its layers."""

from __future__ import annotations

HARMLESS_ARGUMENTS = frozenset(
    {
        "cache_position",
        "dropout",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Attention arguments that do not change the result here; others must be None."""
