"""The forms of models in which some layers have a state in place of keys and values."""

from __future__ import annotations

from typing import Any

import gguf
import torch

from helpers.gguf.form import Form, Parts, experts


def add_kv_heads(writer: gguf.GGUFWriter, config: Any) -> None:
    """Of each layer; none of those with a state."""
    attends = [kind == "full_attention" for kind in config.layer_types]
    key = f"{writer.arch}.attention.head_count_kv"
    del writer.kv_data[0][key]
    writer.add_array(key, [config.num_key_value_heads * own for own in attends])


def add_lfm2(writer: gguf.GGUFWriter, config: Any) -> None:
    add_kv_heads(writer, config)
    writer.add_shortconv_l_cache(config.conv_L_cache)


def add_lfm2_moe(writer: gguf.GGUFWriter, config: Any) -> None:
    add_lfm2(writer, config)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_leading_dense_block_count(config.num_dense_layers)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def own_name(name: str) -> str:
    """Of a weight of a layer, with the file's word for this."""
    return name.replace("model.layers.", "blk.")


def lfm2(name: str, tensor: torch.Tensor, config: Any) -> Parts | None:
    """A convolution has one input for each of its outputs."""
    own = own_name(name)
    if own.endswith("conv.conv.weight"):
        return {own.replace("conv.conv", "shortconv.conv"): tensor[:, 0]}
    if own.endswith("feed_forward.expert_bias"):
        return {own.replace("feed_forward.expert_bias", "exp_probs_b.bias"): tensor}
    return experts(name, tensor, config)


HYBRIDS = {
    "lfm2": Form("lfm2", add_lfm2, lfm2),
    "lfm2_moe": Form("lfm2moe", add_lfm2_moe, lfm2),
}
