"""Tiny mixtures of experts that GGUF files are written of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as tf

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
DEEPSEEK: dict[str, Any] = {
    **COMMON,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "q_lora_rank": None,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 96,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 128,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "n_group": 1,
    "topk_group": 1,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}
MIXTURES: dict[str, Callable[..., Any]] = {
    "deepseek2 as V2 Lite": lambda **more: tf.DeepseekV2Config(
        **DEEPSEEK, rope_parameters=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}, **more
    ),
    "deepseek2 as V2": lambda **more: tf.DeepseekV2Config(
        **DEEPSEEK
        | {"q_lora_rank": 96, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"},
        routed_scaling_factor=4.0,
        **more,
    ),
    "deepseek2 as V3": lambda **more: tf.DeepseekV3Config(
        **DEEPSEEK | {"q_lora_rank": 96, "n_group": 4, "topk_group": 2, "norm_topk_prob": True},
        routed_scaling_factor=2.5,
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        **more,
    ),
}
