"""Tiny models with a recurrent state, and Granite's, that GGUF files are written of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as tf

from helpers.gguf.common import COMMON, FACTORS

GRANITE_4: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_d_state": 32,
    "mamba_n_groups": 2,
    **FACTORS,
}
DENSE: dict[str, Any] = {"num_local_experts": 0, "num_experts_per_tok": 0}
NEMOTRON_H: dict[str, Any] = {
    "head_dim": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 96,
    "ssm_state_size": 32,
    "n_groups": 2,
    "layer_norm_epsilon": 3e-5,
    "num_experts_per_tok": 0,
    "pad_token_id": None,
}
NEMOTRON_3: dict[str, Any] = {
    **COMMON,
    **NEMOTRON_H,
    "head_dim": 64,
    "written_as": "nemotron_h_moe",
    "num_hidden_layers": 5,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 256,
    "moe_shared_expert_intermediate_size": 512,
    "routed_scaling_factor": 2.5,
}
MAMBA_2: dict[str, Any] = {
    "head_dim": 32,
    "mamba_d_ssm": 768,
    "mamba_n_heads": 8,
    "mamba_d_head": 96,
    "mamba_d_state": 32,
    "mamba_n_groups": 2,
    "pad_token_id": None,
}
JAMBA: dict[str, Any] = {
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "mamba_dt_rank": 256,
    "pad_token_id": None,
}
GRANITE_MOE: dict[str, Any] = {
    **FACTORS,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
HYBRID: dict[str, Any] = {
    **COMMON,
    "num_hidden_layers": 4,
    "head_dim": 64,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 8,
}
SHARED_EXPERT: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 512,
}
HYBRIDS: dict[str, Callable[..., Any]] = {
    "lfm2": lambda **more: tf.Lfm2Config(
        **COMMON,
        pad_token_id=None,
        layer_types=["conv", "full_attention"],
        block_auto_adjust_ff_dim=False,
        **more,
    ),
    "lfm2moe": lambda **more: tf.Lfm2MoeConfig(
        **COMMON,
        pad_token_id=None,
        layer_types=["conv", "full_attention"],
        num_dense_layers=1,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=256,
        **more,
    ),
    "granitehybrid": lambda **more: tf.GraniteMoeHybridConfig(
        **COMMON, **GRANITE_4, shared_intermediate_size=512, **DENSE, **more
    ),
    "granitehybrid with experts": lambda **more: tf.GraniteMoeHybridConfig(
        **COMMON,
        **GRANITE_4,
        shared_intermediate_size=256,
        num_local_experts=4,
        num_experts_per_tok=2,
        **more,
    ),
    "granitehybrid with rotations": lambda **more: tf.GraniteMoeHybridConfig(
        **COMMON,
        **GRANITE_4 | {"mamba_conv_bias": False, "attention_bias": True},
        shared_intermediate_size=512,
        position_embedding_type="rope",
        **DENSE,
        **more,
    ),
    "nemotron_h": lambda **more: tf.NemotronHConfig(
        **COMMON | {"num_hidden_layers": 4},
        **NEMOTRON_H,
        layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"],
        **more,
    ),
    "nemotron_h_moe": lambda **more: tf.NemotronHConfig(**NEMOTRON_3, **more),
    "nemotron_h_moe with latents": lambda **more: tf.NemotronHConfig(
        **NEMOTRON_3, moe_latent_size=512, n_group=4, topk_group=2, norm_topk_prob=False, **more
    ),
    "falcon-h1": lambda **more: tf.FalconH1Config(
        **COMMON, **MAMBA_2, mamba_norm_before_gate=False, **more
    ),
    "falcon-h1 with norms": lambda **more: tf.FalconH1Config(
        **COMMON,
        **MAMBA_2,
        mamba_norm_before_gate=False,
        mamba_rms_norm=True,
        mamba_conv_bias=False,
        attention_bias=True,
        **more,
    ),
    "jamba": lambda **more: tf.JambaConfig(
        **COMMON | {"num_hidden_layers": 4}, **JAMBA, num_experts=4, num_experts_per_tok=2, **more
    ),
    "jamba without experts": lambda **more: tf.JambaConfig(
        **COMMON | {"num_hidden_layers": 3}, **JAMBA, num_experts=1, num_experts_per_tok=1, **more
    ),
    "granitemoe": lambda **more: tf.GraniteMoeConfig(**COMMON, **GRANITE_MOE, **more),
    "granitemoe with shared experts": lambda **more: tf.GraniteMoeSharedConfig(
        **COMMON, **GRANITE_MOE, shared_intermediate_size=256, **more
    ),
    "qwen3next": lambda **more: tf.Qwen3NextConfig(**HYBRID, **SHARED_EXPERT, **more),
    "qwen35": lambda **more: tf.Qwen3_5TextConfig(**HYBRID, **more),
    "qwen35moe": lambda **more: tf.Qwen3_5MoeTextConfig(
        **{key: value for key, value in HYBRID.items() if key != "intermediate_size"},
        **SHARED_EXPERT,
        **more,
    ),
}
