"""Mixtures of experts whose attention is as that of others; see deepseek.py for attention to
latents."""

from __future__ import annotations

from typing import Any

from flexinfer.checkpoints.gguf.architecture import SHARED_EXPERTS, Architecture
from flexinfer.checkpoints.gguf.experts import (
    CORRECTION,
    DEEPSEEK_KEYS,
    DENSE,
    GATING,
    GROUPS,
    GROUPS_USED,
    NORM,
    SCALE,
    SHARED,
    SHARED_WIDTH,
    SIGMOID,
    STEP,
    WIDTH,
    deepseek_experts,
    experts_as_wide_as_others,
    only_gating,
)
from flexinfer.checkpoints.gguf.rope import WINDOW, WINDOW_PATTERN, partial_rope_of, windows_of
from flexinfer.checkpoints.gguf.sources import Changed, Source
from flexinfer.checkpoints.gguf.values import NEXT_LAYERS, GgufValues

SHARED_GATE = "mlp.shared_expert_gate.weight"
SHARED_EXPERT = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp.weight": SHARED_GATE,
}
STATICS = "mlp.gate.moe_statics.e_score_correction_bias"


def _qwen2moe(values: GgufValues) -> dict[str, Any]:
    whole, used = values.count("feed_forward_length"), values.count("expert_used_count")
    return {
        "num_experts": values.count("expert_count"),
        "num_experts_per_tok": used,
        "moe_intermediate_size": values.count(WIDTH, whole // used),
        "shared_expert_intermediate_size": values.count(SHARED_WIDTH, whole),
        "norm_topk_prob": values.flag(NORM, False),
        "qkv_bias": values.has_tensor("blk.0.attn_q.bias"),
    }


def as_row(sources: dict[str, Source], config: Any) -> None:
    """Qwen's gate of the shared expert and ERNIE's correction are matrices of one row, which files
    may have as vectors."""
    for name, source in sources.items():
        if name.endswith((SHARED_GATE, STATICS)) and len(source.shape) == 1:
            shape = (1, *source.shape)
            sources[name] = Changed(lambda row: row.unsqueeze(0), source, shape=shape)


def _olmoe(values: GgufValues) -> dict[str, Any]:
    return {**experts_as_wide_as_others(values), "norm_topk_prob": values.flag(NORM, False)}


def _glm4moe(values: GgufValues) -> dict[str, Any]:
    only_gating(values, SIGMOID)
    return {
        "rope_parameters": partial_rope_of(values),
        "use_qk_norm": values.has_tensor("blk.0.attn_q_norm.weight"),
    }


def _dots1(values: GgufValues) -> dict[str, Any]:
    only_gating(values, SIGMOID)
    return {"sliding_window": None}


def _minimax_m2(values: GgufValues) -> dict[str, Any]:
    only_gating(values, SIGMOID)
    return {"rope_parameters": partial_rope_of(values)}


def _minimax_m2_experts(values: GgufValues) -> dict[str, Any]:
    """The file has one width, of experts: all layers have them."""
    return {"num_local_experts": values.count("expert_count")} | experts_as_wide_as_others(values)


def _hunyuan_moe(values: GgufValues) -> dict[str, Any]:
    """One shared expert, as wide as the others."""
    values.mlp_width(SHARED_WIDTH)
    values.equal(SHARED, 1, "the one that such models have", default=1)
    found = experts_as_wide_as_others(values)
    return {"num_experts": found["num_experts"], "moe_topk": found["num_experts_per_tok"]}


def _ernie4_5_moe(values: GgufValues) -> dict[str, Any]:
    """Weights of a token's experts add up to 1."""
    count, width = values.count(SHARED, 0, least=0), values.count(WIDTH)
    if count:
        values.equal(SHARED_WIDTH, count * width, "the width of all shared experts")
    return {
        "moe_num_experts": values.count("expert_count"),
        "moe_k": values.count("expert_used_count"),
        "moe_intermediate_size": width,
        "moe_num_shared_experts": count,
        "moe_layer_start_index": values.count(DENSE, 0, least=0),
        "moe_layer_interval": values.count(STEP),
        "use_bias": values.has_tensor("blk.0.attn_q.bias"),
    }


def _exaone_moe(values: GgufValues) -> dict[str, Any]:
    """Layers without a window rotate nothing."""
    only_gating(values, SIGMOID)
    values.need(WINDOW)
    return windows_of(values, 4)


def _exaone_moe_experts(values: GgufValues) -> dict[str, Any]:
    found = deepseek_experts(values)
    count, shared = found.pop("n_routed_experts"), found.pop("n_shared_experts")
    width = shared * found["moe_intermediate_size"]
    values.equal(SHARED_WIDTH, width, "the width of all shared experts", default=width)
    return {**found, "num_experts": count, "num_shared_experts": shared}


def _afmoe(values: GgufValues) -> dict[str, Any]:
    """Layers without a window rotate nothing. Embeddings are always scaled, as in llama.cpp."""
    only_gating(values, SIGMOID)
    values.need(WINDOW)
    if not values.flag(NORM, False):
        values.refuse(NORM, "only True")
    for key in (GROUPS, GROUPS_USED):
        values.equal(key, 1, "the one of all experts", default=1)
    return {**windows_of(values, 4), "mup_enabled": True}


def _afmoe_experts(values: GgufValues) -> dict[str, Any]:
    return {
        "num_experts": values.count("expert_count"),
        "num_experts_per_tok": values.count("expert_used_count"),
        "moe_intermediate_size": values.count(WIDTH),
        "num_shared_experts": values.count(SHARED),
        "num_dense_layers": values.count(DENSE, 0, least=0),
        "route_scale": values.factor(SCALE, 1.0),
    }


MIXTURES = {
    "qwen2moe": Architecture(
        None,
        experts_config="Qwen2MoeConfig",
        conversions=(as_row,),
        names=SHARED_EXPERT,
        keys=frozenset({SHARED_WIDTH, NORM}),
        expert_settings=_qwen2moe,
    ),
    "olmoe": Architecture(
        None, experts_config="OlmoeConfig", keys=frozenset({NORM}), expert_settings=_olmoe
    ),
    "glm4moe": Architecture(
        None,
        experts_config="Glm4MoeConfig",
        names=SHARED_EXPERTS | CORRECTION | {"post_attention_norm": "post_attention_layernorm"},
        keys=DEEPSEEK_KEYS,
        settings=_glm4moe,
        expert_settings=deepseek_experts,
        rotates_all=False,
    ),
    "dots1": Architecture(
        None,
        experts_config="Dots1Config",
        names=SHARED_EXPERTS | CORRECTION,
        keys=DEEPSEEK_KEYS,
        settings=_dots1,
        expert_settings=deepseek_experts,
    ),
    "minimax-m2": Architecture(
        None,
        experts_config="MiniMaxM2Config",
        names={"exp_probs_b.bias": "mlp.e_score_correction_bias"},
        keys=frozenset({GATING}),
        settings=_minimax_m2,
        expert_settings=_minimax_m2_experts,
        rotates_all=False,
    ),
    "hunyuan-moe": Architecture(
        None,
        experts_config="HunYuanMoEV1Config",
        names={
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
            "ffn_gate_inp": "mlp.gate.wg",
            "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
            "ffn_up_shexp": "mlp.shared_mlp.up_proj",
            "ffn_down_shexp": "mlp.shared_mlp.down_proj",
        },
        keys=frozenset({SHARED, SHARED_WIDTH}),
        expert_settings=_hunyuan_moe,
    ),
    "ernie4_5-moe": Architecture(
        None,
        experts_config="Ernie4_5_MoeConfig",
        conversions=(as_row,),
        names=SHARED_EXPERTS | {"exp_probs_b.bias": STATICS},
        keys=frozenset({SHARED, SHARED_WIDTH, DENSE, STEP}),
        expert_settings=_ernie4_5_moe,
    ),
    "exaone-moe": Architecture(
        None,
        experts_config="ExaoneMoeConfig",
        names=SHARED_EXPERTS | CORRECTION,
        keys=DEEPSEEK_KEYS | {SHARED_WIDTH, WINDOW, WINDOW_PATTERN},
        settings=_exaone_moe,
        expert_settings=_exaone_moe_experts,
    ),
    "afmoe": Architecture(
        None,
        experts_config="AfmoeConfig",
        names=SHARED_EXPERTS
        | {
            "attn_gate": "self_attn.gate_proj",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_mlp_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_gate_inp": "mlp.router.gate",
            "exp_probs_b.bias": "mlp.expert_bias",
        },
        keys=DEEPSEEK_KEYS - {NEXT_LAYERS} | {WINDOW, WINDOW_PATTERN},
        settings=_afmoe,
        expert_settings=_afmoe_experts,
    ),
}
