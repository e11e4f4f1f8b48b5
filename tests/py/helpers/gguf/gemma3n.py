"""How Gemma 3n is written."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import gguf
import numpy as np
import torch

from helpers.gguf.form import Parts, add_bases, replace_key

STACKED = {"altup_projections": "altup_proj", "altup_unembed_projections": "altup_unembd_proj"}


def add_keys(writer: gguf.GGUFWriter, config: Any) -> None:
    replace_key(writer, "feed_forward_length", config.intermediate_size)
    add_bases(writer, config)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_altup_active_idx(config.altup_active_idx)
    writer.add_altup_num_inputs(config.altup_num_inputs)
    parts = config.activation_sparsity_pattern
    scales = [NormalDist().inv_cdf(part) if part else -np.inf for part in parts]
    writer.add_activation_sparsity_scale(scales)


def stacked(tensors: dict[str, torch.Tensor]) -> Parts:
    """Of all weights of the model the matrices that stand one behind the other in the file."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        module = name.removeprefix("model.").split(".")[0]
        if module in STACKED:
            found.setdefault(f"{STACKED[module]}.weight", []).append(tensor)
    return {name: torch.stack(matrices) for name, matrices in found.items()}


def parts(name: str, tensor: torch.Tensor, config: Any) -> Parts | None:
    """Matrices that `stacked` makes are none by themselves."""
    return {} if name.removeprefix("model.").split(".")[0] in STACKED else None
