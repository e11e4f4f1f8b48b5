"""How DeepSeek's models, and those with routed experts like theirs, are written."""

from __future__ import annotations

from typing import Any

import gguf
import torch

from helpers.gguf.form import Parts, replace_key


def experts(name: str, tensor: torch.Tensor, config: Any) -> Parts | None:
    """Gates and factors of all experts apart, and what is added to scores."""
    if not name.startswith("model.layers."):
        return None
    prefix = f"blk.{name.split('.')[2]}."
    if name.endswith("e_score_correction_bias"):
        return {f"{prefix}exp_probs_b.bias": tensor.view(-1)}
    if "experts.down_proj" in name and "shared" not in name:
        return {f"{prefix}ffn_down_exps.weight": tensor}
    if "experts.gate_up_proj" in name:
        gate, up = tensor.chunk(2, 1)
        return {f"{prefix}ffn_gate_exps.weight": gate, f"{prefix}ffn_up_exps.weight": up}
    return None


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
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)


def add_latents(writer: gguf.GGUFWriter, config: Any) -> None:
    is_third = config.model_type == "deepseek_v3"
    add_experts(writer, config)
    kinds = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(kinds.SIGMOID if is_third else kinds.SOFTMAX)
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
