"""Tiny models that GGUF files are written of, and the types of their tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as tf

from flexinfer.checkpoints.gguf.blocks import DECODERS
from helpers.gguf.common import COMMON
from helpers.gguf.files import Type
from helpers.gguf.mixtures import FACTORS, MIXTURES

GRANITE_4: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_d_state": 32,
    "mamba_n_groups": 2,
    "attention_multiplier": 0.1,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
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
    "attention_multiplier": 0.1,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
WINDOWED: dict[str, Any] = {
    **COMMON,
    "num_hidden_layers": 4,
    "head_dim": 64,
    "global_head_dim": 128,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "pad_token_id": None,
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
CONFIGS: dict[str, Callable[..., Any]] = {
    "llama": lambda **more: tf.LlamaConfig(**COMMON, **more),
    "llama with biases": lambda **more: tf.LlamaConfig(**COMMON, attention_bias=True, **more),
    "qwen2": lambda **more: tf.Qwen2Config(**COMMON, **more),
    "qwen3": lambda **more: tf.Qwen3Config(**COMMON, head_dim=32, **more),
    "smollm3": lambda **more: tf.SmolLM3Config(
        **COMMON | {"num_hidden_layers": 5}, pad_token_id=None, **more
    ),
    "granite": lambda **more: tf.GraniteConfig(**COMMON, **FACTORS, **more),
    "olmo2": lambda **more: tf.Olmo2Config(**COMMON, **more),
    "phi3": lambda **more: tf.Phi3Config(**COMMON, pad_token_id=None, sliding_window=None, **more),
    "phi3 with a window": lambda **more: tf.Phi3Config(
        **COMMON, pad_token_id=None, sliding_window=16, **more
    ),
    "phi3 for long contexts": lambda **more: tf.Phi3Config(
        **COMMON,
        pad_token_id=None,
        sliding_window=None,
        original_max_position_embeddings=128,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1 + i / 16 for i in range(24)],
            "long_factor": [3.0 + i for i in range(24)],
            "original_max_position_embeddings": 128,
            "attention_factor": 1.25,
            "partial_rotary_factor": 0.75,
        },
        **more,
    ),
    "qwen3 by yarn": lambda **more: tf.Qwen3Config(
        **COMMON,
        head_dim=32,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        **more,
    ),
    "llama with more biases": lambda **more: tf.LlamaConfig(
        **COMMON, attention_bias=True, mlp_bias=True, **more
    ),
    "gemma": lambda **more: tf.GemmaConfig(**COMMON, head_dim=32, **more),
    "gemma2": lambda **more: tf.Gemma2Config(
        **COMMON,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=16,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
        # transformers 5.17 drops the soft cap under SDPA; eager is right in every version.
        attn_implementation="eager",
        **more,
    ),
    "gemma3": lambda **more: tf.Gemma3TextConfig(
        **COMMON | {"num_hidden_layers": 7},
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=16,
        **more,
    ),
    "gemma3n": lambda **more: tf.Gemma3nTextConfig(
        **{key: value for key, value in WINDOWED.items() if key != "global_head_dim"},
        hidden_size_per_layer_input=64,
        vocab_size_per_layer_input=128,
        num_kv_shared_layers=2,
        laurel_rank=16,
        activation_sparsity_pattern=[0.95, 0.5, 0.0, 0.0],
        **more,
    ),
    "gemma4": lambda **more: tf.Gemma4TextConfig(
        **WINDOWED | {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]} | more,
        hidden_size_per_layer_input=0,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        final_logit_softcapping=3.0,
    ),
    "gemma4 with embeddings of each layer": lambda **more: tf.Gemma4TextConfig(
        **WINDOWED,
        hidden_size_per_layer_input=64,
        vocab_size_per_layer_input=128,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        **more,
    ),
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
    "gpt-oss": lambda **more: tf.GptOssConfig(
        **COMMON,
        head_dim=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
        **more,
    ),
    **MIXTURES,
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
