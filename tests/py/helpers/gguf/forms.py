"""The forms that are known, by the model types of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf
import torch

from helpers.gguf import gated_delta, gemma3n, gemma4
from helpers.gguf import mixture_forms as mixtures
from helpers.gguf.form import Form, Parts
from helpers.gguf.hybrids import HYBRIDS
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


def add_window(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window or 0)


def add_expert_width(writer: gguf.GGUFWriter, config: Any) -> None:
    width = getattr(config, "moe_intermediate_size", config.intermediate_size)
    writer.add_expert_feed_forward_length(width)


def add_both(writer: gguf.GGUFWriter, config: Any) -> None:
    add_window(writer, config)
    add_expert_width(writer, config)


def one_more(name: str, tensor: torch.Tensor, config: Any) -> Parts | None:
    """Norms of Gemma. What is written is rounded, and so is the model's."""
    if "norm" not in name:
        return None
    tensor.copy_((tensor + 1) - 1)
    return {FORMS[config.model_type].name_of(name, config): tensor + 1}


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
    "qwen3_moe": Form("qwen3moe", add_expert_width, experts),
    "gpt_oss": Form("gpt-oss", add_both, gpt_oss),
    "smollm3": Form("smollm3", parts=paired),
    "granite": Form("granite", parts=paired),
    "olmo2": Form("olmo2"),
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
    "gemma4_text": Form("gemma4", gemma4.add_keys),
    "qwen3_next": Form("qwen3next", gated_delta.add_keys, hybrid(gated_delta.qwen3next)),
    "qwen3_5_text": Form("qwen35", gated_delta.add_all_keys, hybrid(gated_delta.qwen35)),
    "qwen3_5_moe_text": Form("qwen35moe", gated_delta.add_all_keys, hybrid(gated_delta.qwen35)),
}
"""transformers' model type -> how it is written."""
