"""Tiny random models whose layers are not all alike: in window, shape, or in what they share.

Weights are drawn wide, so that greedy outputs vary; windows are 16 tokens.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers as tf

from helpers.tiny_models import CONFIGS, TINY, VOCAB_SIZE, continue_prompt, draw_model

torch.set_num_threads(1)

_COMMON: dict[str, Any] = {**TINY, "num_key_value_heads": 2, "initializer_range": 0.3}
_ONE_IN_TWO = ["sliding_attention", "full_attention"]
_WINDOWS: dict[str, Any] = {**_COMMON, "sliding_window": 16, "layer_types": _ONE_IN_TWO * 2}

_LATENTS: dict[str, Any] = {
    **_COMMON,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}

# An index chooses 64 tokens. Where scores are nearly equal, rounding chooses: of a prompt in parts
# others than of a whole one, in transformers too. So heads are many and layers are few.
_INDEX: dict[str, Any] = {
    "q_lora_rank": 32,
    "index_topk": 64,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
}

FAMILIES: dict[str, Any] = {
    "gemma2": CONFIGS["gemma2"],
    "gemma3": CONFIGS["gemma3"],
    "gpt_oss": CONFIGS["gpt_oss"],
    "mistral": CONFIGS["mistral"],
    "cohere2": lambda: tf.Cohere2Config(**_WINDOWS, logit_scale=1.0),
    "exaone4": lambda: tf.Exaone4Config(**_WINDOWS, sliding_window_pattern=2),
    "olmo3": lambda: tf.Olmo3Config(**_WINDOWS),
    "phi3": lambda: tf.Phi3Config(**_COMMON, sliding_window=16),
    "gemma3n": lambda: tf.Gemma3nTextConfig(
        **{**_WINDOWS, "num_hidden_layers": 6, "layer_types": _ONE_IN_TWO * 3},
        head_dim=16,
        num_kv_shared_layers=3,
        activation_sparsity_pattern=[0.5] + [0.0] * 5,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=VOCAB_SIZE,
        laurel_rank=8,
        altup_num_inputs=2,
    ),
    # Queries are scaled by position from the fourth token on.
    "llama4": lambda: tf.Llama4TextConfig(
        **{**_COMMON, "layer_types": ["chunked_attention", "full_attention"] * 2},
        head_dim=16,
        no_rope_layers=[1, 0, 1, 0],
        attention_chunk_size=16,
        floor_scale=4,
        num_local_experts=2,
        intermediate_size_mlp=96,
    ),
    "gemma4": lambda: tf.Gemma4TextConfig(
        **{**_WINDOWS, "num_hidden_layers": 6, "layer_types": _ONE_IN_TWO * 3},
        head_dim=16,
        global_head_dim=32,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=VOCAB_SIZE,
    ),
    # Keys are wider than values.
    "mimo_v2": lambda: tf.MiMoV2FlashConfig(
        **_WINDOWS, **_EXPERTS, head_dim=48, v_head_dim=32, mlp_layer_types=["dense"] * 4
    ),
    "deepseek_v2": lambda: tf.DeepseekV2Config(
        **_LATENTS, **_EXPERTS, q_lora_rank=None, first_k_dense_replace=2
    ),
    "deepseek_v3": lambda: tf.DeepseekV3Config(
        **_LATENTS, **_EXPERTS, q_lora_rank=32, first_k_dense_replace=2
    ),
    # Attention is called twice in a layer, with one K and two V.
    "diffllama": lambda: tf.DiffLlamaConfig(**_COMMON),
    # The mask alone tells its window.
    "phimoe": lambda: tf.PhimoeConfig(
        **_COMMON, sliding_window=16, num_local_experts=2, num_experts_per_tok=1
    ),
    "minicpm3": lambda: tf.MiniCPM3Config(**_LATENTS, q_lora_rank=32),
    "deepseek_v32": lambda: tf.DeepseekV32Config(**{**_LATENTS, **_EXPERTS, **_INDEX}),
    # The second layer sees what the index of the first has chosen.
    "glm_moe_dsa": lambda: tf.GlmMoeDsaConfig(
        **{**_LATENTS, **_EXPERTS, **_INDEX}, indexer_types=["full", "shared"]
    ),
}
"""Family -> config."""


@cache
def make_family(name: str) -> Any:
    """The model of FAMILIES[name]. Not to be changed."""
    return draw_model(FAMILIES[name]())


@cache
def continuation(name: str, prompt: tuple[int, ...], num_new: int) -> list[int]:
    return continue_prompt(make_family(name), prompt, num_new)
