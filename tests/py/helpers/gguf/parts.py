"""What several converters do to weights: a weight of the model -> the file's tensors; None: the one
that gguf has a name for."""

from __future__ import annotations

from typing import Any

import torch

from helpers.gguf.form import Parts


def paired(name: str, tensor: torch.Tensor, config: Any) -> Parts | None:
    """Rows of each head in llama.cpp's order, which rotates neighbours."""
    module, _, ending = name.removeprefix("model.layers.").rpartition(".")
    if "experts" in name:
        return experts(name, tensor, config)
    if not module.endswith(("q_proj", "k_proj")):
        return None
    layer, part = module.split(".")[0], module[-6]
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rows = torch.unflatten(tensor, 0, (-1, 2, width // 2)).transpose(1, 2)
    return {f"blk.{layer}.attn_{part}.{ending}": rows}


def experts(name: str, tensor: torch.Tensor, config: Any) -> Parts | None:
    """Gates and factors of all experts apart, and what is added to scores."""
    if name.endswith(("correction_bias", "expert_bias")):
        return {f"blk.{name.split('.')[2]}.exp_probs_b.bias": tensor.view(-1)}
    if ".experts." not in name:
        return None
    prefix = f"blk.{name.split('.')[2]}.ffn_"
    if "down_proj" in name:
        return {f"{prefix}down_exps.weight": tensor}
    gate, up = tensor.chunk(2, 1)
    return {f"{prefix}gate_exps.weight": gate, f"{prefix}up_exps.weight": up}
