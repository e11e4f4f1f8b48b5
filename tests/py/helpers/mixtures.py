"""Tiny mixtures of experts, and what an engine generates with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers as tf

from flexinfer import LLM, SamplingParams
from helpers.tiny_models import TINY

NUM_TOKENS = 10
COMMON: dict[str, Any] = {
    **TINY,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
CONFIGS: dict[str, Any] = {
    "mixtral": lambda: tf.MixtralConfig(**COMMON, num_local_experts=4),
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(
        **COMMON, head_dim=32, moe_intermediate_size=32, num_experts=8
    ),
    "qwen2_moe": lambda: tf.Qwen2MoeConfig(
        **COMMON,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=4,
        mlp_only_layers=[0],
    ),
    "olmoe": lambda: tf.OlmoeConfig(**COMMON, num_experts=4),
    "gpt_oss": lambda: tf.GptOssConfig(
        **COMMON,
        num_local_experts=4,
        head_dim=16,
        sliding_window=16,
        rope_scaling=None,
        swiglu_limit=2.0,
    ),
    "gemma4_text": lambda: tf.Gemma4TextConfig(
        **{key: value for key, value in COMMON.items() if key != "num_experts_per_tok"},
        head_dim=32,
        global_head_dim=32,
        hidden_size_per_layer_input=0,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=32,
    ),
    "nemotron_h": lambda: tf.NemotronHConfig(
        **COMMON | {"num_hidden_layers": 4},
        layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
        head_dim=32,
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=2,
        n_routed_experts=4,
        moe_intermediate_size=64,  # kernels have outputs by 64
        moe_shared_expert_intermediate_size=32,
        routed_scaling_factor=2.5,
    ),
    "granitemoe": lambda: tf.GraniteMoeConfig(**COMMON, num_local_experts=4),
}
"""The last is read by transformers, the others an expert at a time."""


def generate(folder: Path, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    settings = {"skip_tokenizer_init": True, "dtype": "float32", **settings}
    with LLM(str(folder), **settings) as llm:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
