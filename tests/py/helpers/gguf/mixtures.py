"""Tiny mixtures of experts that GGUF files are written of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as tf

from helpers.gguf.common import COMMON

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
ROUTED: dict[str, Any] = {
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 128,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 4,
    "topk_group": 2,
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
    "deepseek2 as Youtu": lambda **more: tf.YoutuConfig(
        **COMMON | {"num_key_value_heads": 4},
        q_lora_rank=96,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=96,
        **more,
    ),
    "qwen2moe": lambda **more: tf.Qwen2MoeConfig(
        **COMMON,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=192,
        **more,
    ),
    "olmoe": lambda **more: tf.OlmoeConfig(
        **COMMON | {"num_key_value_heads": 4},
        num_experts=6,
        num_experts_per_tok=2,
        pad_token_id=None,
        **more,
    ),
    "glm4moe": lambda **more: tf.Glm4MoeConfig(
        **COMMON | ROUTED, attention_bias=True, use_qk_norm=True, **more
    ),
    "glm4moe as GLM 4.5 Air": lambda **more: tf.Glm4MoeConfig(
        **COMMON | ROUTED, attention_bias=True, head_dim=48, **more
    ),
    "dots1": lambda **more: tf.Dots1Config(
        **COMMON | ROUTED | {"num_key_value_heads": 4},
        head_dim=48,
        sliding_window=None,
        **more,
    ),
    "minimax-m2": lambda **more: tf.MiniMaxM2Config(
        **COMMON,
        head_dim=64,
        num_local_experts=6,
        num_experts_per_tok=2,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        },
        **more,
    ),
    "hunyuan-moe": lambda **more: tf.HunYuanMoEV1Config(
        **COMMON, num_experts=6, moe_topk=2, head_dim=64, pad_token_id=None, **more
    ),
    "ernie4_5-moe": lambda **more: tf.Ernie4_5_MoeConfig(
        **COMMON | {"num_hidden_layers": 4},
        moe_num_experts=6,
        moe_k=2,
        moe_intermediate_size=128,
        moe_num_shared_experts=2,
        moe_layer_start_index=1,
        moe_layer_interval=2,
        pad_token_id=None,
        **more,
    ),
    "exaone-moe": lambda **more: tf.ExaoneMoeConfig(
        **COMMON | {"num_hidden_layers": 4},
        head_dim=64,
        sliding_window=16,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=128,
        num_shared_experts=2,
        n_group=4,
        topk_group=2,
        pad_token_id=None,
        **more,
    ),
    "afmoe": lambda **more: tf.AfmoeConfig(
        **COMMON | {"num_hidden_layers": 4},
        head_dim=64,
        sliding_window=16,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        num_shared_experts=2,
        num_dense_layers=1,
        route_scale=2.0,
        mup_enabled=True,
        **more,
    ),
}
