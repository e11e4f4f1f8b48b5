"""How mixtures of experts are written: DeepSeek's, and those that are like them."""

from __future__ import annotations

from typing import Any

import gguf
import torch

from helpers.gguf.form import Parts, add_pattern, add_window, replace_key
from helpers.gguf.parts import experts


def latents(name: str, tensor: torch.Tensor, config: Any) -> Parts | None:
    """What makes keys and values of latents apart, too."""
    if "kv_b_proj" not in name:
        return experts(name, tensor, config)
    prefix = f"blk.{name.split('.')[2]}.attn_"
    of_heads = tensor.unflatten(0, (config.num_attention_heads, -1))
    keys, values = of_heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
    return {f"{prefix}k_b.weight": keys.transpose(1, 2), f"{prefix}v_b.weight": values}


def add_experts(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    shared = getattr(config, "n_shared_experts", None) or config.num_shared_experts
    writer.add_expert_shared_count(shared)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)


def add_latents(writer: gguf.GGUFWriter, config: Any) -> None:
    is_third = config.model_type == "deepseek_v3"
    add_experts(writer, config)
    kinds = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(kinds.SIGMOID if is_third else kinds.SOFTMAX)
    add_widths(writer, config)


def add_dense(writer: gguf.GGUFWriter, config: Any) -> None:
    """Of models without experts, which the file has keys for, too."""
    writer.add_leading_dense_block_count(config.num_hidden_layers)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_expert_shared_count(0)
    add_widths(writer, config)


def add_widths(writer: gguf.GGUFWriter, config: Any) -> None:
    """Of latents and heads."""
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    if (scale := config.rope_parameters.get("mscale_all_dim")) is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * scale)
    writer.add_key_length_mla(config.qk_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    replace_key(writer, "attention.key_length", config.kv_lora_rank + config.qk_rope_head_dim)
    replace_key(writer, "attention.value_length", config.kv_lora_rank)
    replace_key(writer, "attention.head_count_kv", 1)


def add_routed(writer: gguf.GGUFWriter, config: Any) -> None:
    """Of models that choose experts as DeepSeek V3 does."""
    add_experts(writer, config)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def add_sigmoid(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def add_shared_width(writer: gguf.GGUFWriter, config: Any) -> None:
    """Of Qwen 2's shared expert."""
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def add_hunyuan(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.intermediate_size)
    writer.add_expert_shared_count(1)


def add_ernie(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_interleave_moe_layer_step(config.moe_layer_interval)
    writer.add_leading_dense_block_count(config.moe_layer_start_index)
    writer.add_expert_shared_count(config.moe_num_shared_experts)
    width = config.moe_num_shared_experts * config.moe_intermediate_size
    writer.add_expert_shared_feed_forward_length(width)


def add_exaone(writer: gguf.GGUFWriter, config: Any) -> None:
    add_routed(writer, config)
    add_pattern(writer, config)


def add_afmoe(writer: gguf.GGUFWriter, config: Any) -> None:
    add_window(writer, config)
    writer.add_leading_dense_block_count(config.num_dense_layers)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.num_shared_experts)
    writer.add_expert_weights_scale(config.route_scale)
    writer.add_expert_weights_norm(True)


NAMES_OF_AFMOE = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_mlp_layernorm": "ffn_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "self_attn.gate_proj": "attn_gate",
    "mlp.router.gate": "ffn_gate_inp",
}


def afmoe(name: str, tensor: torch.Tensor, config: Any) -> Parts | None:
    """Names that gguf's table takes for those of others."""
    for own, part in NAMES_OF_AFMOE.items():
        if name.endswith(f"{own}.weight"):
            return {f"blk.{name.split('.')[2]}.{part}.weight": tensor}
    return experts(name, tensor, config)
