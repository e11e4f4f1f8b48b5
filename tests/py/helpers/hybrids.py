"""Tiny random models that keep a recurrent state beside KV.

Weights are drawn wide, so that greedy outputs vary; chunks of the scans are 8 tokens.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers as tf

from flexinfer import LLMEngine
from helpers import engine_kit
from helpers.tiny_models import TINY, continue_prompt, draw_model

torch.set_num_threads(1)

_COMMON: dict[str, Any] = {**TINY, "num_key_value_heads": 2, "initializer_range": 0.3}
_LINEAR_AND_FULL = ["linear_attention", "full_attention"]
_DELTA: dict[str, Any] = {
    **_COMMON,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", *_LINEAR_AND_FULL, "linear_attention"],
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_MINIMAX: dict[str, Any] = {
    **_COMMON,
    "head_dim": 16,
    "block_size": 8,
    "layer_types": _LINEAR_AND_FULL * 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
}

HYBRIDS: dict[str, Any] = {
    "qwen3_next": lambda: tf.Qwen3NextConfig(**_DELTA, **_EXPERTS),
    "qwen3_5": lambda: tf.Qwen3_5TextConfig(**_DELTA),
    "bamba": lambda: tf.BambaConfig(
        **_COMMON | {"num_hidden_layers": 3}, **_MAMBA2, attn_layer_indices=[1]
    ),
    "granitemoehybrid": lambda: tf.GraniteMoeHybridConfig(
        **_COMMON,
        **_MAMBA2,
        layer_types=_LINEAR_AND_FULL * 2,
        num_local_experts=4,
        shared_intermediate_size=64,
        attention_multiplier=0.25,
    ),
    "jamba": lambda: tf.JambaConfig(
        **_COMMON,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=4,
        mamba_dt_rank=8,
        use_mamba_kernels=False,
    ),
    # Its lightning attention keeps a matrix a head.
    "minimax": lambda: tf.MiniMaxConfig(**_MINIMAX),
    "minimax_with_windows": lambda: tf.MiniMaxConfig(**_MINIMAX, sliding_window=16),
    "nemotron_h": lambda: tf.NemotronHConfig(
        **_COMMON,
        layers_block_type=["mamba", "moe", "attention", "mamba"],
        head_dim=16,
        mamba_num_heads=4,
        mamba_head_dim=32,
        ssm_state_size=16,
        n_groups=2,
        chunk_size=8,
        use_mamba_kernels=False,
        n_routed_experts=4,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
    ),
}
"""Family -> config."""
UNLIKE_CACHED = {"minimax_with_windows"}
"""transformers' cache of it shows its attention more than the window: what it generates with it is
not what it says of the same tokens without."""
SEEDS = {"nemotron_h": 1}
"""Of weights, where with those of others rounding chooses the experts: transformers itself then
gives other tokens step by step than at once."""


@cache
def make_hybrid(name: str) -> Any:
    """The model of HYBRIDS[name]. Not to be changed."""
    return draw_model(HYBRIDS[name](), SEEDS.get(name, 0))


@cache
def continuation(name: str, prompt: tuple[int, ...], num_new: int) -> list[int]:
    return continue_prompt(make_hybrid(name), prompt, num_new, name not in UNLIKE_CACHED)


def make_engine(name: str, **settings: Any) -> LLMEngine:
    defaults = {
        "kv_cache_memory_bytes": 8 << 20,
        "max_num_batched_tokens": 32,
        "state_snapshot_tokens": 16,
    }
    return engine_kit.make_engine(make_hybrid(name), **{**defaults, **settings})
