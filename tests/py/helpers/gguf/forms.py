"""The forms that are known, by the model types of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf
import torch

from helpers.gguf import gated_delta, gemma3n, gemma4
from helpers.gguf import mixture_forms as mixtures
from helpers.gguf.form import Form, Parts, add_bases, add_pattern, add_window
from helpers.gguf.hybrid_forms import HYBRIDS
from helpers.gguf.parts import experts, paired


def gpt_oss(name: str, tensor: torch.Tensor, config: Any) -> Parts | None:
    """Gates and factors take turns, inputs come first in the model."""
    if "experts." not in name:
        return None
    ending = "bias" if name.endswith("_bias") else "weight"
    prefix = f"blk.{name.split('.')[2]}.ffn_"
    rows = tensor.transpose(1, 2) if tensor.dim() == 3 else tensor
    if "down_proj" in name:
        return {f"{prefix}down_exps.{ending}": rows}
    gate, up = rows[:, ::2], rows[:, 1::2]
    return {f"{prefix}gate_exps.{ending}": gate, f"{prefix}up_exps.{ending}": up}


def add_expert_width(writer: gguf.GGUFWriter, config: Any) -> None:
    width = getattr(config, "moe_intermediate_size", config.intermediate_size)
    writer.add_expert_feed_forward_length(width)


def add_temperature(writer: gguf.GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    if "llama_4_scaling_beta" in rope:
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])


def add_sections(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_rope_dimension_sections([8, 12, 12, 0])
    if writer.arch == "qwen3vl":
        writer.add_uint32("qwen3vl.n_deepstack_layers", 3)


def add_both(writer: gguf.GGUFWriter, config: Any) -> None:
    add_window(writer, config)
    add_expert_width(writer, config)


def without_joined(name: str, tensor: torch.Tensor, config: Any) -> Parts | None:
    """Queries, keys and values are one tensor, which is not made of one weight of the model."""
    return {} if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj") else None


def halved(name: str, tensor: torch.Tensor, config: Any) -> Parts | None:
    """Of the rows of each head that are rotated, half of all, the even ones and then the odd ones:
    not a view of them."""
    if name.split(".")[-2] not in ("q_proj", "k_proj"):
        return None
    heads = torch.unflatten(tensor, 0, (-1, config.head_dim)).clone()
    half = heads[:, : config.head_dim // 2]
    rotated = torch.cat([half[:, ::2], half[:, 1::2], heads[:, config.head_dim // 2 :]], dim=1)
    return {form_of(config).name_of(name, config): rotated.view(tensor.shape)}


def add_rotations(writer: gguf.GGUFWriter, config: Any) -> None:
    add_pattern(writer, config)
    rotates = [base > 0 for base in config.layer_rope_theta]
    writer.add_array(f"{writer.arch}.attention.rope_pattern", rotates)


def with_sinks(name: str, tensor: torch.Tensor, config: Any) -> Parts | None:
    """Of an architecture that gguf does not know: its other names are Granite's."""
    if name.endswith("sinks"):
        return {f"blk.{name.split('.')[2]}.attn_sinks.weight": tensor}
    return paired(name, tensor, config) or {FORMS["granite"].name_of(name, config): tensor}


def add_clamp(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_layer_norm_eps(1e-5)
    if config.clip_qkv is not None:
        writer.add_clamp_kqv(config.clip_qkv)


def add_xielu(writer: gguf.GGUFWriter, config: Any) -> None:
    for name, numbers in config.xielu.items():
        writer.add_array(f"xielu.{name}", numbers)


def with_xielu(name: str, tensor: torch.Tensor, config: Any) -> Parts | None:
    """The activation's numbers are no tensors: the model's are set to those of the config."""
    module, _, part = name.rpartition(".")
    if not module.endswith("act_fn"):
        return None
    tensor.fill_(config.xielu[part][int(name.split(".")[2])])
    return {}


def add_parallel(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_parallel_residual(config.use_parallel_residual)


def without_head_norms(name: str, tensor: torch.Tensor, config: Any) -> Parts | None:
    """Those of all heads are one tensor, which is not made of one weight of the model."""
    return {} if ".norms." in name else None


def one_more(name: str, tensor: torch.Tensor, config: Any) -> Parts | None:
    """Norms of Gemma. What is written is rounded, and so is the model's."""
    if not name.endswith("norm.weight"):
        return None
    tensor.copy_((tensor + 1) - 1)
    return {form_of(config).name_of(name, config): tensor + 1}


def hybrid(own: Callable[[str, torch.Tensor, Any], Parts | None]) -> Any:
    """Delta nets in their own way, the rest as others."""

    def parts(name: str, tensor: torch.Tensor, config: Any) -> Parts | None:
        if gated_delta.NET in name:
            return own(name, tensor, config)
        return experts(name, tensor, config) or one_more(name, tensor, config)

    return parts


FORMS = {
    "llama": Form("llama", parts=paired),
    "mistral": Form("llama", parts=paired),
    "mixtral": Form("llama", parts=paired),
    "qwen2": Form("qwen2"),
    "qwen3": Form("qwen3"),
    "qwen2vl": Form("qwen2vl", add_sections),
    "qwen3vl": Form("qwen3vl", add_sections),
    "mistral3": Form("mistral3", parts=paired),
    "ministral3": Form("mistral3", add_temperature, paired),
    "qwen3_moe": Form("qwen3moe", add_expert_width, experts),
    "gpt_oss": Form("gpt-oss", add_both, gpt_oss),
    "smollm3": Form("smollm3", parts=paired),
    "granite": Form("granite", parts=paired),
    "granite_swa": Form("granite_swa", add_rotations, with_sinks),
    "olmo": Form("olmo", add_clamp, paired),
    "olmo2": Form("olmo2"),
    "olmo3": Form("olmo2", add_bases),
    "seed_oss": Form("seed_oss"),
    "ernie4_5": Form("ernie4_5"),
    "hunyuan_v1_dense": Form("hunyuan-dense"),
    "arcee": Form("arcee", parts=paired),
    "glm": Form("chatglm"),
    "glm joined": Form("chatglm", parts=without_joined),
    "phi2 joined": Form("phi2", parts=without_joined),
    "glm4": Form("glm4"),
    "glm4v": Form("glm4", add_sections, halved),
    "exaone4": Form("exaone4", add_pattern),
    "cohere": Form("command-r"),
    "cohere2": Form("cohere2", add_window),
    "apertus": Form("apertus", add_xielu, with_xielu),
    "starcoder2": Form("starcoder2"),
    "nemotron": Form("nemotron", parts=one_more),
    "jais2": Form("jais2"),
    "stablelm": Form("stablelm", add_parallel, without_head_norms),
    "phi": Form("phi2"),
    "phi3": Form("phi3", add_window),
    "deepseek_v2": Form("deepseek2", mixtures.add_latents, mixtures.latents),
    "deepseek_v3": Form("deepseek2", mixtures.add_latents, mixtures.latents),
    "youtu": Form("deepseek2", mixtures.add_dense, mixtures.latents),
    "qwen2_moe": Form("qwen2moe", mixtures.add_shared_width, experts),
    "exaone_moe": Form("exaone-moe", mixtures.add_exaone, experts),
    "afmoe": Form("afmoe", mixtures.add_afmoe, mixtures.afmoe),
    "olmoe": Form("olmoe", parts=experts),
    "glm4_moe": Form("glm4moe", mixtures.add_routed, experts),
    "dots1": Form("dots1", mixtures.add_routed, experts),
    "minimax_m2": Form("minimax-m2", mixtures.add_sigmoid, experts),
    "hunyuan_v1_moe": Form("hunyuan-moe", mixtures.add_hunyuan, experts),
    "ernie4_5_moe": Form("ernie4_5-moe", mixtures.add_ernie, experts),
    "gemma": Form("gemma", parts=one_more),
    "gemma2": Form("gemma2", add_window, one_more),
    "gemma3_text": Form("gemma3", add_window, one_more),
    **HYBRIDS,
    "gemma3n_text": Form("gemma3n", gemma3n.add_keys, gemma3n.parts, gemma3n.stacked),
    "gemma4_text": Form("gemma4", gemma4.add_keys, gemma4.parts),
    "qwen3_next": Form("qwen3next", gated_delta.add_keys, hybrid(gated_delta.qwen3next)),
    "qwen3_5_text": Form("qwen35", gated_delta.add_all_keys, hybrid(gated_delta.qwen35)),
    "qwen3_5_moe_text": Form("qwen35moe", gated_delta.add_all_keys, hybrid(gated_delta.qwen35)),
}
"""transformers' model type, or what a config is `written_as` -> how it is written."""


def form_of(config: Any) -> Form:
    return FORMS[getattr(config, "written_as", config.model_type)]
