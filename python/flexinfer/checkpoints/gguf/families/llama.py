"""Llama's kin: a gated MLP or experts behind rotated attention, RMS norms."""

from __future__ import annotations

from flexinfer.checkpoints.gguf.architecture import Architecture
from flexinfer.checkpoints.gguf.conversions import part_pairs

NORMS_BEHIND = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LLAMA = {
    "llama": Architecture("LlamaConfig", conversions=(part_pairs,), experts_config="MixtralConfig"),
    "qwen2": Architecture("Qwen2Config"),
    "qwen3": Architecture("Qwen3Config"),
    "qwen3moe": Architecture(None, experts_config="Qwen3MoeConfig"),
    "smollm3": Architecture("SmolLM3Config", conversions=(part_pairs,)),
    "olmo2": Architecture("Olmo2Config", names=NORMS_BEHIND),
}
