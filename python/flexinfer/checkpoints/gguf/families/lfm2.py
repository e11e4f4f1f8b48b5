"""LFM2: short convolutions, and attention in some layers; with experts, some of them dense."""

from __future__ import annotations

from typing import Any

from flexinfer.checkpoints.gguf.architecture import Architecture
from flexinfer.checkpoints.gguf.conversions import one_input
from flexinfer.checkpoints.gguf.experts import DENSE, GATING, SIGMOID, WIDTH
from flexinfer.checkpoints.gguf.hybrid import KV_HEADS, attending, heads_of
from flexinfer.checkpoints.gguf.values import GgufValues

NORM, KERNEL = "attention.layer_norm_rms_epsilon", "shortconv.l_cache"
NAMES = {
    "token_embd_norm": "model.embedding_norm",
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
OF_EXPERTS = {
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b.bias": "feed_forward.expert_bias",
}


def _settings(values: GgufValues) -> dict[str, Any]:
    """The width of the MLPs is what the file says: nothing is made of it."""
    kinds = ["full_attention" if attends else "conv" for attends in attending(values)]
    return {
        **heads_of(values),
        "layer_types": kinds,
        "conv_L_cache": values.count(KERNEL),
        "norm_eps": values.factor(NORM),
        "block_auto_adjust_ff_dim": False,
    }


def _expert_settings(values: GgufValues) -> dict[str, Any]:
    if values.need(GATING) != SIGMOID:
        values.refuse(GATING, f"only {SIGMOID}, sigmoid")
    return {
        "num_experts": values.count("expert_count"),
        "num_experts_per_tok": values.count("expert_used_count"),
        "moe_intermediate_size": values.count(WIDTH),
        "num_dense_layers": values.count(DENSE, 0, least=0),
        "use_expert_bias": True,
        "norm_topk_prob": True,
    }


LFM2 = {
    "lfm2": Architecture(
        "Lfm2Config",
        conversions=(one_input,),
        names=NAMES,
        keys=frozenset({KV_HEADS, NORM, KERNEL}),
        settings=_settings,
    ),
    "lfm2moe": Architecture(
        None,
        experts_config="Lfm2MoeConfig",
        conversions=(one_input,),
        experts="feed_forward.experts",
        names=NAMES | OF_EXPERTS,
        keys=frozenset({KV_HEADS, NORM, KERNEL, DENSE, GATING}),
        settings=_settings,
        expert_settings=_expert_settings,
    ),
}
