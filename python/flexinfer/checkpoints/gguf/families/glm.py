"""GLM: joined gates, half of a head rotated; GLM 4 of 2025 with norms on both sides."""

from __future__ import annotations

from typing import Any

import torch

from flexinfer.checkpoints.gguf.architecture import Architecture
from flexinfer.checkpoints.gguf.conversions import part_joined
from flexinfer.checkpoints.gguf.rope import SECTIONS, partial_rope_of
from flexinfer.checkpoints.gguf.sources import Ordered, Source
from flexinfer.checkpoints.gguf.values import GgufValues

NAMES = {
    "ffn_up": "mlp.gate_up_proj",
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}


def _settings(values: GgufValues) -> dict[str, Any]:
    """Of models that see images, too. llama.cpp rotates the halves of a head there, where it
    rotates neighbours else, and the config takes along that rows are so ordered."""
    return {
        "rotates_halves": any(values.of_layers(SECTIONS) or ()),
        "attention_bias": values.has_tensor("blk.0.attn_q.bias"),
        "rope_parameters": partial_rope_of(values),
    }


def _pair_halves(sources: dict[str, Source], config: Any) -> None:
    """Rows of queries and keys, of which the model rotates neighbours together."""
    if not config.rotates_halves:
        return
    half = int(config.head_dim * config.rope_parameters["partial_rotary_factor"]) // 2
    head = torch.arange(config.head_dim)
    head[: 2 * half] = head[: 2 * half].view(2, half).T.flatten()
    for name, source in sources.items():
        if name.split(".")[-2] in ("q_proj", "k_proj"):
            first = torch.arange(0, source.shape[0], config.head_dim)
            sources[name] = Ordered(source, (first[:, None] + head).flatten())


def _glm(values: GgufValues) -> dict[str, Any]:
    biases = ("blk.0.attn_q.bias", "blk.0.attn_qkv.bias")
    return {
        "attention_bias": any(values.has_tensor(name) for name in biases),
        "rope_parameters": partial_rope_of(values),
    }


GLM = {
    "chatglm": Architecture(
        "GlmConfig",
        conversions=(part_joined,),
        names={"ffn_up": "mlp.gate_up_proj", "attn_qkv": "self_attn.qkv_proj"},
        settings=_glm,
        rotates_all=False,
    ),
    "glm4": Architecture(
        "Glm4Config",
        conversions=(_pair_halves,),
        names=NAMES,
        keys=frozenset({SECTIONS}),
        settings=_settings,
        rotates_all=False,
    ),
}
