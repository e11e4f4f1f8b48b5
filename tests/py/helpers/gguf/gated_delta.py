"""How the models of gated delta nets are written."""

from __future__ import annotations

from typing import Any

import gguf
import torch

from helpers.gguf.form import Moved, Parts

NET = "linear_attn."


def add_keys(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    recurrent = [kind == "linear_attention" for kind in config.layer_types]
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", recurrent)
    writer.add_uint32(f"{writer.arch}.full_attention_interval", 4)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def add_all_keys(writer: gguf.GGUFWriter, config: Any) -> None:
    add_keys(writer, config)
    writer.add_rope_dimension_sections([11, 11, 10, 0])


def qwen35(name: str, tensor: torch.Tensor, config: Any) -> Parts | None:
    """Of the heads of values the first one of all heads of keys, then the second ones."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    heads = torch.arange(values).view(keys, -1).T.flatten()
    inner = torch.arange(values * config.linear_value_head_dim).view(values, -1)[heads].flatten()
    first = 2 * keys * config.linear_key_head_dim
    behind_keys = torch.cat([torch.arange(first), first + inner])
    layer, part = name.removeprefix("model.layers.").split(f".{NET}")
    whole = f"blk.{layer}."
    match part:
        case "in_proj_qkv.weight":
            return {f"{whole}attn_qkv.weight": Moved(tensor, behind_keys)}
        case "conv1d.weight":
            return {f"{whole}ssm_conv1d.weight": Moved(tensor.squeeze(1), behind_keys)}
        case "in_proj_z.weight":
            return {f"{whole}attn_gate.weight": Moved(tensor, inner)}
        case "out_proj.weight":
            return {f"{whole}ssm_out.weight": Moved(tensor, inner, dim=1)}
        case "in_proj_a.weight":
            return {f"{whole}ssm_alpha.weight": Moved(tensor, heads)}
        case "in_proj_b.weight":
            return {f"{whole}ssm_beta.weight": Moved(tensor, heads)}
        case "dt_bias":
            return {f"{whole}ssm_dt.bias": Moved(tensor, heads)}
        case "A_log":
            return {f"{whole}ssm_a": decay(tensor)[heads]}
        case _:
            return None


def qwen3next(name: str, tensor: torch.Tensor, config: Any) -> Parts | None:
    """Queries, keys and values apart from gates, each of all heads."""
    keys = config.linear_num_key_heads
    values = config.linear_num_value_heads // keys * config.linear_value_head_dim
    layer, part = name.removeprefix("model.layers.").split(f".{NET}")
    whole = f"blk.{layer}."
    match part:
        case "in_proj_qkvz.weight":
            widths = [config.linear_key_head_dim] * 2 + [values] * 2
            heads = torch.arange(len(tensor)).view(keys, -1).split(widths, dim=1)
            *rows, gates = (rows.flatten() for rows in heads)
            return {
                f"{whole}attn_qkv.weight": Moved(tensor, torch.cat(rows)),
                f"{whole}attn_gate.weight": Moved(tensor, gates),
            }
        case "conv1d.weight":
            return {f"{whole}ssm_conv1d.weight": tensor.squeeze(1)}
        case "in_proj_ba.weight":
            return {f"{whole}ssm_ba.weight": tensor}
        case "dt_bias":
            return {f"{whole}ssm_dt.bias": tensor}
        case "A_log":
            return {f"{whole}ssm_a": decay(tensor)}
        case _:
            return None


def decay(tensor: torch.Tensor) -> torch.Tensor:
    """What is written is rounded, and so is the model's."""
    written = -tensor.exp()
    tensor.copy_((-written).log())
    return written
