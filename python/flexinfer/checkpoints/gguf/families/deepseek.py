"""DeepSeek's V2 and V3, and models like them: attention to latents, shared experts."""

from __future__ import annotations

from typing import Any

import torch

from flexinfer.checkpoints.gguf.architecture import SHARED_EXPERTS, Architecture
from flexinfer.checkpoints.gguf.experts import (
    CORRECTION,
    DEEPSEEK_KEYS,
    DENSE,
    GATING,
    GROUPS,
    NORM,
    SIGMOID,
    SOFTMAX,
    deepseek_experts,
)
from flexinfer.checkpoints.gguf.rope import MSCALE, ROTATED, YARN_SCORE_FACTOR, rope_of
from flexinfer.checkpoints.gguf.sources import Changed, Source
from flexinfer.checkpoints.gguf.values import GgufValues
from flexinfer.errors import UnsupportedModelError

QUERY_LATENTS, LATENTS = "attention.q_lora_rank", "attention.kv_lora_rank"
KEY_WIDTH, VALUE_WIDTH = "attention.key_length_mla", "attention.value_length_mla"
"""Of heads. Where they are there, the lengths without "_mla" are those of latents."""
HALVES = ("self_attn.k_b_proj.weight", "self_attn.v_b_proj.weight")
WHOLE = "self_attn.kv_b_proj.weight"
NAMES = SHARED_EXPERTS | {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b.weight": HALVES[0],
    "attn_v_b.weight": HALVES[1],
    **CORRECTION,
}


def _join_heads(sources: dict[str, Source], config: Any) -> None:
    """Newer files have what makes keys and values of latents apart, [heads, latents, keys] and
    [heads, values, latents]: of each head keys, then values, in the model."""
    heads, latents = config.num_attention_heads, config.kv_lora_rank
    keys, values = config.qk_nope_head_dim, config.v_head_dim
    wanted = [(heads, latents, keys), (heads, values, latents)]
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        halves = [sources.pop(prefix + half) for half in HALVES if prefix + half in sources]
        if not halves:
            continue
        shapes = [half.shape for half in halves]
        if shapes != wanted:
            raise UnsupportedModelError(
                f"it has {prefix}{WHOLE} in {len(halves)} halves, "
                f"{' and '.join(map(str, map(list, shapes)))}; there have to be "
                f"{' and '.join(map(str, map(list, wanted)))}"
            )
        if prefix + WHOLE in sources:
            raise UnsupportedModelError(f"it has {prefix}{WHOLE} beside its halves")
        whole = (heads * (keys + values), latents)
        sources[prefix + WHOLE] = Changed(_joined, *halves, shape=whole)


def _joined(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.cat([keys.transpose(1, 2), values.to(keys.dtype)], dim=1).flatten(0, 1)


def _config_of(values: GgufValues) -> str:
    """V2 takes the softmax of what routers give, V3 a sigmoid, and chooses by it and a correction.
    Files of GLM 4.7 Flash do not say so: llama.cpp knows them by their number of layers."""
    layers = range(values.num_layers())
    is_corrected = any(values.has_tensor(f"blk.{layer}.exp_probs_b.bias") for layer in layers)
    gating = values.get(GATING, SIGMOID if is_corrected else SOFTMAX)
    if gating not in (SOFTMAX, SIGMOID):
        values.refuse(GATING, f"only {SOFTMAX} and {SIGMOID}")
    if gating == SIGMOID:
        return "DeepseekV3Config"
    if values.flag(NORM, False):
        values.refuse(NORM, f"only False where {GATING} is {SOFTMAX}")
    return "DeepseekV2Config"


def _settings(values: GgufValues) -> dict[str, Any]:
    heads, latents = values.count("attention.head_count"), values.count(LATENTS)
    rotated = values.count(ROTATED)
    are_latents_kept = values.get(KEY_WIDTH) is not None
    width, value_width = (
        values.count(f"attention.{part}_length{'_mla' if are_latents_kept else ''}")
        for part in ("key", "value")
    )
    if width <= rotated:
        values.refuse(ROTATED, f"less than the width of keys, {width}")
    if are_latents_kept:
        values.equal("attention.head_count_kv", 1, "the one of latents")
        values.equal("attention.key_length", latents + rotated, "the latents and what is rotated")
        values.equal("attention.value_length", latents, "the latents")
    else:
        values.equal("attention.head_count_kv", heads, "those of queries")
    if values.get(YARN_SCORE_FACTOR) is not None:
        values.refuse(YARN_SCORE_FACTOR, f"none: {MSCALE} says it")
    layers = values.num_layers()
    if not values.get("expert_count"):  # Youtu
        values.equal(DENSE, layers, "all layers", default=layers)
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": values.count(QUERY_LATENTS) if values.get(QUERY_LATENTS) else None,
        "kv_lora_rank": latents,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": width - rotated,
        "v_head_dim": value_width,
        "rope_parameters": _rope(values),
        **_choice_of_groups(values),
    }


def _rope(values: GgufValues) -> dict[str, Any]:
    """The file has a tenth of the factor of scores where yarn stretches positions. llama.cpp takes
    the rotations' own to be the same, which is not in the file: both cancel out there."""
    rope = rope_of(values)
    if rope["rope_type"] != "yarn" or values.get(MSCALE) is None:
        return rope
    scale = round(values.factor(MSCALE) / 0.1, 6)
    return rope | {"mscale": scale, "mscale_all_dim": scale}


def _choice_of_groups(values: GgufValues) -> dict[str, str]:
    """V2 takes the groups with the best experts; llama.cpp those whose best two add up to most, as
    is right for V3."""
    if not values.get("expert_count") or _config_of(values) == "DeepseekV3Config":
        return {}
    is_grouped = values.count(GROUPS, 1) > 1
    return {"topk_method": "group_limited_greedy" if is_grouped else "greedy"}


DEEPSEEK = {
    "deepseek2": Architecture(
        "YoutuConfig",
        experts_config=_config_of,
        conversions=(_join_heads,),
        names=NAMES,
        keys=DEEPSEEK_KEYS
        | {QUERY_LATENTS, LATENTS, KEY_WIDTH, VALUE_WIDTH, MSCALE, "attention.head_count_kv"},
        settings=_settings,
        expert_settings=deepseek_experts,
        rotates_all=False,
    )
}
