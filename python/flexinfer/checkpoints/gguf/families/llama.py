"""Llama's kin: a gated MLP or experts behind rotated attention, RMS norms."""

from __future__ import annotations

from typing import Any

from flexinfer.checkpoints.gguf.architecture import Architecture
from flexinfer.checkpoints.gguf.conversions import part_pairs
from flexinfer.checkpoints.gguf.rope import SECTIONS
from flexinfer.checkpoints.gguf.values import GgufValues

NORMS_BEHIND = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _qwen3moe(values: GgufValues) -> dict[str, Any]:
    """Weights of a token's experts add up to 1."""
    used = values.count("expert_used_count")
    width = values.count("feed_forward_length") // used
    return {
        "num_experts": values.count("expert_count"),
        "num_experts_per_tok": used,
        "moe_intermediate_size": values.count("expert_feed_forward_length", width),
        "norm_topk_prob": True,
    }


def _seed_oss(values: GgufValues) -> dict[str, Any]:
    return {"attention_bias": values.has_tensor("blk.0.attn_q.bias")}


# Of the models that see images, what reads text: the tower is in a file of its own, and what it
# adds to the first layers (n_deepstack_layers) is of images alone.
LLAMA = {
    "llama": Architecture("LlamaConfig", conversions=(part_pairs,), experts_config="MixtralConfig"),
    "qwen2": Architecture("Qwen2Config"),
    "qwen3": Architecture("Qwen3Config"),
    "qwen2vl": Architecture("Qwen2Config", keys=frozenset({SECTIONS})),
    "qwen3vl": Architecture("Qwen3Config", keys=frozenset({SECTIONS, "n_deepstack_layers"})),
    "qwen3moe": Architecture(None, experts_config="Qwen3MoeConfig", expert_settings=_qwen3moe),
    "seed_oss": Architecture(
        "SeedOssConfig",
        names={"post_attention_norm": "post_attention_layernorm"},
        settings=_seed_oss,
    ),
    # It rotates neighbours itself, as llama.cpp does.
    "ernie4_5": Architecture("Ernie4_5Config"),
    "hunyuan-dense": Architecture(
        "HunYuanDenseV1Config",
        names={
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
        },
    ),
    "arcee": Architecture("ArceeConfig", conversions=(part_pairs,)),
    "smollm3": Architecture("SmolLM3Config", conversions=(part_pairs,)),
}
