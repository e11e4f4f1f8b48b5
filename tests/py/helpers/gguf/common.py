"""What tiny models have in common that GGUF files are written of."""

from __future__ import annotations

from typing import Any

from helpers.tiny_models import TINY

COMMON: dict[str, Any] = {
    **{name: value for name, value in TINY.items() if name != "pad_token_id"},
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
}
FACTORS: dict[str, Any] = {
    "attention_multiplier": 0.1,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
"""Of Granite."""
