"""GLM 4: norms on both sides, joined gates, half of a head rotated."""

from __future__ import annotations

from typing import Any

from flexinfer.checkpoints.gguf.architecture import Architecture
from flexinfer.checkpoints.gguf.rope import partial_rope_of
from flexinfer.checkpoints.gguf.values import GgufValues

NAMES = {
    "ffn_up": "mlp.gate_up_proj",
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}


def _settings(values: GgufValues) -> dict[str, Any]:
    return {
        "attention_bias": values.has("blk.0.attn_q.bias"),
        "rope_parameters": partial_rope_of(values),
    }


GLM = {"glm4": Architecture("Glm4Config", names=NAMES, settings=_settings, rotates_all=False)}
