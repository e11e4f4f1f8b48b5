"""Tiny models that GGUF files are written of, and the types of their tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as tf

from flexinfer.checkpoints.gguf.blocks import DECODERS
from helpers.gguf.common import COMMON, FACTORS
from helpers.gguf.files import Type
from helpers.gguf.hybrids import HYBRIDS
from helpers.gguf.mixtures import MIXTURES

WINDOWED: dict[str, Any] = {
    **COMMON,
    "num_hidden_layers": 4,
    "head_dim": 64,
    "global_head_dim": 128,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "pad_token_id": None,
}
CONFIGS: dict[str, Callable[..., Any]] = {
    "llama": lambda **more: tf.LlamaConfig(**COMMON, **more),
    "llama with biases": lambda **more: tf.LlamaConfig(**COMMON, attention_bias=True, **more),
    "qwen2": lambda **more: tf.Qwen2Config(**COMMON, **more),
    "qwen3": lambda **more: tf.Qwen3Config(**COMMON, head_dim=32, **more),
    "qwen2vl": lambda **more: tf.Qwen2Config(**COMMON, written_as="qwen2vl", **more),
    "qwen3vl": lambda **more: tf.Qwen3Config(**COMMON, head_dim=64, written_as="qwen3vl", **more),
    "mistral3": lambda **more: tf.MistralConfig(
        **COMMON, head_dim=32, sliding_window=None, written_as="mistral3", **more
    ),
    "ministral3": lambda **more: tf.Ministral3Config(
        **COMMON,
        head_dim=32,
        pad_token_id=None,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 16.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.5,
        },
        **more,
    ),
    "smollm3": lambda **more: tf.SmolLM3Config(
        **COMMON | {"num_hidden_layers": 5}, pad_token_id=None, **more
    ),
    "granite": lambda **more: tf.GraniteConfig(**COMMON, **FACTORS, **more),
    "granite_swa": lambda **more: tf.GraniteSWAConfig(
        **COMMON | {"num_hidden_layers": 3},
        **FACTORS,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        layer_rope_theta=[1e4, 0.0, 0.0],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        **more,
    ),
    "olmo": lambda **more: tf.OlmoConfig(**COMMON, pad_token_id=None, **more),
    "olmo with clamps": lambda **more: tf.OlmoConfig(
        **COMMON, pad_token_id=None, clip_qkv=0.5, **more
    ),
    "olmo2": lambda **more: tf.Olmo2Config(**COMMON, **more),
    "olmo3": lambda **more: tf.Olmo3Config(
        **COMMON | {"num_hidden_layers": 5},
        pad_token_id=None,
        sliding_window=16,
        layer_types=[
            f"{kind}_attention" for kind in ("sliding", "full", "sliding", "full", "full")
        ],
        rope_parameters={
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 1e5,
                "factor": 8.0,
                "attention_factor": 1.5,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 32,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        **more,
    ),
    "seed_oss": lambda **more: tf.SeedOssConfig(**COMMON, head_dim=32, pad_token_id=None, **more),
    "seed_oss without biases": lambda **more: tf.SeedOssConfig(
        **COMMON, head_dim=32, pad_token_id=None, attention_bias=False, **more
    ),
    "ernie4_5": lambda **more: tf.Ernie4_5Config(**COMMON, head_dim=32, pad_token_id=None, **more),
    "hunyuan-dense": lambda **more: tf.HunYuanDenseV1Config(
        **COMMON, head_dim=32, pad_token_id=None, eod_token_id=None, **more
    ),
    "arcee": lambda **more: tf.ArceeConfig(**COMMON, **more),
    "chatglm": lambda **more: tf.GlmConfig(**COMMON, head_dim=64, pad_token_id=None, **more),
    "glm4": lambda **more: tf.Glm4Config(**COMMON, head_dim=32, pad_token_id=None, **more),
    "exaone4": lambda **more: tf.Exaone4Config(
        **COMMON | {"num_hidden_layers": 5},
        sliding_window=16,
        layer_types=[*["sliding_attention", "full_attention"] * 2, "full_attention"],
        **more,
    ),
    "exaone4 without windows": lambda **more: tf.Exaone4Config(
        **COMMON, sliding_window=None, layer_types=["full_attention"] * 2, **more
    ),
    "command-r": lambda **more: tf.CohereConfig(**COMMON, pad_token_id=None, **more),
    "command-r with norms": lambda **more: tf.CohereConfig(
        **COMMON, pad_token_id=None, use_qk_norm=True, attention_bias=True, **more
    ),
    "cohere2": lambda **more: tf.Cohere2Config(
        **COMMON | {"num_hidden_layers": 5}, pad_token_id=None, sliding_window=16, **more
    ),
    "apertus": lambda **more: tf.ApertusConfig(
        **COMMON,
        pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        xielu={
            "alpha_p": [0.25, 1.5],
            "alpha_n": [-0.5, 0.75],
            "beta": [0.5, 0.25],
            "eps": [-0.25, -0.5],
        },
        **more,
    ),
    "starcoder2": lambda **more: tf.Starcoder2Config(**COMMON, **more),
    "nemotron": lambda **more: tf.NemotronConfig(**COMMON, **more),
    "nemotron with biases": lambda **more: tf.NemotronConfig(
        **COMMON, attention_bias=True, mlp_bias=True, **more
    ),
    "jais2": lambda **more: tf.Jais2Config(**COMMON, **more),
    "jais2 without biases": lambda **more: tf.Jais2Config(
        **COMMON, attention_bias=False, mlp_bias=False, **more
    ),
    "stablelm": lambda **more: tf.StableLmConfig(**COMMON, use_qkv_bias=True, **more),
    "stablelm side by side": lambda **more: tf.StableLmConfig(
        **COMMON, use_parallel_residual=True, **more
    ),
    "phi2": lambda **more: tf.PhiConfig(**COMMON, **more),
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
    "gemma4 with experts": lambda **more: tf.Gemma4TextConfig(
        **WINDOWED,
        hidden_size_per_layer_input=0,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        enable_moe_block=True,
        num_experts=6,
        top_k_experts=2,
        moe_intermediate_size=256,
        final_logit_softcapping=3.0,
        **more,
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
    **HYBRIDS,
}

ALWAYS_TIED = {"gemma", "gemma2", "command-r", "command-r with norms", "cohere2", "lfm2moe"}
"""Of which llama.cpp knows no head that is not the embedding."""
NEVER_TIED = {"nemotron_h", "nemotron_h_moe", "nemotron_h_moe with latents"}
"""Of which transformers needs a head."""


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
