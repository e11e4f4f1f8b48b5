"""How Gemma 4 is written."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import torch

from helpers.gguf.form import Parts, add_bases, replace_key

UNROTATED = 1e30
OF_EXPERTS = {
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
}
"""The model's names of what only layers with experts have -> the file's."""


def parts(name: str, tensor: torch.Tensor, config: Any) -> Parts | None:
    """Gates and factors of all experts are one tensor."""
    layer, _, own = name.removeprefix("model.layers.").partition(".")
    return {f"blk.{layer}.{OF_EXPERTS[own]}": tensor} if own in OF_EXPERTS else None


def add_keys(writer: gguf.GGUFWriter, config: Any) -> None:
    """Layers without a window are the ones that others' keys speak of."""
    kinds, count = config.layer_types, config.num_hidden_layers
    windowed, shared = vars(config), config.num_kv_shared_layers
    full = config.per_layer_config[kinds.index("full_attention")]
    for name in ("key_length", "value_length"):
        replace_key(writer, f"attention.{name}", full.head_dim)
        getattr(writer, f"add_{name}_swa")(windowed["head_dim"])
    writer.add_rope_dimension_count(full.head_dim)
    writer.add_rope_dimension_count_swa(windowed["head_dim"])
    if full.num_key_value_heads != windowed["num_key_value_heads"]:
        own = (windowed["num_key_value_heads"], full.num_key_value_heads)
        heads = [own[kind == "full_attention"] for kind in kinds]
        replace_key(writer, "attention.head_count_kv", heads)
    if config.use_double_wide_mlp:
        widths = [config.intermediate_size] * (count - shared)
        widths += [2 * config.intermediate_size] * shared
        replace_key(writer, "feed_forward_length", widths)
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    add_bases(writer, config)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    rotated = config.rope_parameters["full_attention"]["partial_rotary_factor"]
    factors = np.full(full.head_dim // 2, UNROTATED, np.float32)
    factors[: int(full.head_dim * rotated / 2)] = 1
    writer.add_tensor("rope_freqs.weight", factors)
