"""Tiny models that GGUF files are written of, and the types of their tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as tf

from flexinfer.checkpoints.gguf_blocks import DECODERS
from helpers.gguf_files import Type

COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
}
CONFIGS: dict[str, Callable[..., Any]] = {
    "llama": lambda **more: tf.LlamaConfig(**COMMON, **more),
    "llama with biases": lambda **more: tf.LlamaConfig(**COMMON, attention_bias=True, **more),
    "qwen2": lambda **more: tf.Qwen2Config(**COMMON, **more),
    "qwen3": lambda **more: tf.Qwen3Config(**COMMON, head_dim=32, **more),
    "mixtral": lambda **more: tf.MixtralConfig(
        **COMMON, num_local_experts=4, num_experts_per_tok=2, **more
    ),
    "qwen3moe": lambda **more: tf.Qwen3MoeConfig(
        **COMMON,
        head_dim=64,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=256,
        norm_topk_prob=True,
        **more,
    ),
}


def mixed(name: str) -> Type:
    """As llama.cpp's Q4_K_M: more bits for values, for what the MLP gives, and for the head."""
    is_better = any(part in name for part in ("attn_v", "ffn_down", "output.weight"))
    return Type.Q6_K if is_better and "attn_output" not in name else Type.Q4_K


def same(kind: Type) -> Callable[[str], Type]:
    return lambda name: kind


QUANTISED = {Type[name]: name for name in DECODERS}
TYPES = {
    **{name: same(kind) for kind, name in QUANTISED.items()},
    **{kind.name: same(kind) for kind in (Type.F32, Type.F16, Type.BF16)},
    "Q4_K_M": mixed,
}
