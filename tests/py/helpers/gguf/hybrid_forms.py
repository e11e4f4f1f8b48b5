"""The forms of models in which some layers have a state in place of keys and values."""

from __future__ import annotations

from typing import Any

import gguf
import torch

from helpers.gguf.form import Form, Parts, replace_key
from helpers.gguf.parts import experts, paired


def add_kv_heads(writer: gguf.GGUFWriter, config: Any) -> None:
    """Of each layer; none of those with a state."""
    attends = [kind == "full_attention" for kind in config.layer_types]
    heads = [config.num_key_value_heads * own for own in attends]
    replace_key(writer, "attention.head_count_kv", heads)


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


def add_mamba2(writer: gguf.GGUFWriter, inner: int, heads: int, sizes: list[int]) -> None:
    """sizes: of the convolution, the state, and how many groups there are."""
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_time_step_rank(heads)
    adds = writer.add_ssm_conv_kernel, writer.add_ssm_state_size, writer.add_ssm_group_count
    for add, size in zip(adds, sizes, strict=True):
        add(size)


def decays_of(logarithms: torch.Tensor) -> torch.Tensor:
    """Those of the model are set to what is made of the decays."""
    decays = -torch.exp(logarithms)
    logarithms.copy_(torch.log(-decays))
    return decays


def mamba2(name: str, tensor: torch.Tensor, num_groups: int) -> Parts | None:
    """name: without the mixer's."""
    own, _, part = own_name(name).rpartition(".")
    if part == "A_log":
        return {f"{own}.ssm_a": decays_of(tensor)[:, None]}
    if part == "D":
        return {f"{own}.ssm_d": tensor[:, None]}
    if part == "dt_bias":
        return {f"{own}.ssm_dt.bias": tensor}
    if name.endswith("conv1d.weight"):
        return {own.replace("conv1d", "ssm_conv1d.weight"): tensor[:, 0]}
    if name.endswith("norm.weight"):
        return {own.replace("norm", "ssm_norm.weight"): tensor.view(num_groups, -1)}
    return None


def add_granite(writer: gguf.GGUFWriter, config: Any) -> None:
    add_kv_heads(writer, config)
    inner = config.mamba_expand * config.hidden_size
    sizes = [config.mamba_d_conv, config.mamba_d_state, config.mamba_n_groups]
    add_mamba2(writer, inner, config.mamba_n_heads, sizes)
    writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")


def granite(name: str, tensor: torch.Tensor, config: Any) -> Parts | None:
    """Halves of the shared MLP apart, which has a name of its own beside experts."""
    if ".mamba." in name:
        return mamba2(name.replace(".mamba", ""), tensor, config.mamba_n_groups)
    own = own_name(name)
    if own.endswith("block_sparse_moe.router.weight"):
        return {own.replace("block_sparse_moe.router", "ffn_gate_inp"): tensor}
    if "shared_mlp" not in own:
        return paired(name, tensor, config)
    prefix, ending = own.partition("shared_mlp")[0], "_shexp" if config.num_local_experts else ""
    if "output_linear" in own:
        return {f"{prefix}ffn_down{ending}.weight": tensor}
    gate, up = tensor.chunk(2)
    return {f"{prefix}ffn_gate{ending}.weight": gate, f"{prefix}ffn_up{ending}.weight": up}


def add_nemotron(writer: gguf.GGUFWriter, config: Any) -> None:
    """Its norms have an epsilon by another name."""
    add_kv_heads(writer, config)
    add_widths(writer, config, "mlp", config.intermediate_size)
    for key in ("attention.layer_norm_rms_epsilon", "rope.freq_base"):
        replace_key(writer, key, None)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    inner = config.mamba_num_heads * config.mamba_head_dim
    sizes = [config.conv_kernel, config.ssm_state_size, config.n_groups]
    add_mamba2(writer, inner, config.mamba_num_heads, sizes)


def add_widths(writer: gguf.GGUFWriter, config: Any, kind: str, width: int) -> None:
    """Of the layers of this kind; 0 of others."""
    widths = [width * (own == kind) for own in config.layer_types]
    replace_key(writer, "feed_forward_length", widths)


def add_nemotron_moe(writer: gguf.GGUFWriter, config: Any) -> None:
    add_nemotron(writer, config)
    add_widths(writer, config, "moe", config.moe_intermediate_size)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    if config.moe_latent_size is not None:
        writer.add_uint32(f"{writer.arch}.moe_latent_size", config.moe_latent_size)


OF_EXPERTS = {
    "mixer.gate.weight": "ffn_gate_inp.weight",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.experts.up_proj": "ffn_up_exps.weight",
    "mixer.experts.down_proj": "ffn_down_exps.weight",
    "mixer.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mixer.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
    "mixer.fc1_latent_proj.weight": "ffn_latent_down.weight",
    "mixer.fc2_latent_proj.weight": "ffn_latent_up.weight",
}
"""The model's names of what only layers with experts have -> the file's."""


def nemotron_moe(name: str, tensor: torch.Tensor, config: Any) -> Parts | None:
    layer, _, own = name.removeprefix("model.layers.").partition(".")
    if own in OF_EXPERTS:
        return {f"blk.{layer}.{OF_EXPERTS[own]}": tensor}
    return nemotron(name, tensor, config)


def nemotron(name: str, tensor: torch.Tensor, config: Any) -> Parts | None:
    """gguf knows its names as they were."""
    parts = paired(name, tensor, config)
    if parts is None and ".mixer." in name:
        parts = mamba2(name.replace(".mixer", ""), tensor, config.n_groups)
    if parts is None:
        before = name.replace("model.", "backbone.")
        parts = {HYBRIDS["nemotron_h"].name_of(before, config): tensor}
    return parts


def add_falcon_h1(writer: gguf.GGUFWriter, config: Any) -> None:
    """Its factors, which are 1 here, are in the weights."""
    replace_key(writer, "embedding_scale", None)
    sizes = [config.mamba_d_conv, config.mamba_d_state, config.mamba_n_groups]
    add_mamba2(writer, config.mamba_d_ssm, config.mamba_n_heads, sizes)


def falcon_h1(name: str, tensor: torch.Tensor, config: Any) -> Parts | None:
    """Its second norm has a name without an ending."""
    if ".mamba." in name:
        return mamba2(name.replace(".mamba", ""), tensor, config.mamba_n_groups)
    own = own_name(name)
    if own.endswith("pre_ff_layernorm.weight"):
        return {own.replace("pre_ff_layernorm.weight", "ffn_norm"): tensor}
    return None


def add_jamba(writer: gguf.GGUFWriter, config: Any) -> None:
    add_kv_heads(writer, config)
    writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
    writer.add_ssm_time_step_rank(config.mamba_dt_rank)
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)


def jamba(name: str, tensor: torch.Tensor, config: Any) -> Parts | None:
    """Mamba has decays of each input, and a projection for time steps."""
    own, _, part = own_name(name).replace("mamba.", "").rpartition(".")
    if part == "A_log":
        return {f"{own}.ssm_a": decays_of(tensor)}
    if part == "D":
        return {f"{own}.ssm_d": tensor}
    if name.endswith("conv1d.weight"):
        return {own.replace("conv1d", "ssm_conv1d.weight"): tensor[:, 0]}
    return experts(name, tensor, config)


def add_granite_moe(writer: gguf.GGUFWriter, config: Any) -> None:
    if getattr(config, "shared_intermediate_size", None):
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)


HYBRIDS = {
    "granitemoe": Form("granitemoe", add_granite_moe, granite),
    "granitemoeshared": Form("granitemoe", add_granite_moe, granite),
    "jamba": Form("jamba", add_jamba, jamba),
    "falcon_h1": Form("falcon-h1", add_falcon_h1, falcon_h1),
    "nemotron_h": Form("nemotron_h", add_nemotron, nemotron),
    "nemotron_h_moe": Form("nemotron_h_moe", add_nemotron_moe, nemotron_moe),
    "granitemoehybrid": Form("granitehybrid", add_granite, granite),
    "lfm2": Form("lfm2", add_lfm2, lfm2),
    "lfm2_moe": Form("lfm2moe", add_lfm2_moe, lfm2),
}
