"""Tiny folders of gpt-oss in MXFP4, and models with the numbers that they hold."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import transformers as tf

from helpers.mixtures import COMMON
from helpers.packed_folders import save

SETTINGS: dict[str, Any] = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}
MATRICES = ("gate_up_proj", "down_proj")
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the lower three bits of four, the upper one being the sign."""


def config(**more: Any) -> Any:
    own = {"head_dim": 16, "sliding_window": 16, "num_local_experts": 4}
    return tf.GptOssConfig(**{**COMMON, **own, **more})


def draw(experts: int, inputs: int, outputs: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and scales of numbers around 0.1."""
    generator = torch.Generator().manual_seed(seed)
    shape = (experts, outputs, inputs // 32)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(120, 124, shape, generator=generator, dtype=torch.uint8)
    return blocks, exponents


def numbers(blocks: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """float64 [..., 32 * groups], number by number, as the specification says."""
    flat = blocks.reshape(-1, 16).tolist()
    rows = []
    for bytes_, exponent in zip(flat, exponents.flatten().tolist(), strict=True):
        codes = [code for byte in bytes_ for code in (byte & 15, byte >> 4)]
        signs = [-1.0 if code & 8 else 1.0 for code in codes]
        rows.append(
            [
                sign * MAGNITUDES[code & 7] * 2.0 ** (exponent - 127)
                for sign, code in zip(signs, codes, strict=True)
            ]
        )
    return torch.tensor(rows, dtype=torch.float64).view(*blocks.shape[:-2], -1)


def write_folder(folder: Path, model: Any, settings: dict[str, Any] | None = None) -> Any:
    """Write the model with its experts in MXFP4; returns a copy of it with the numbers that were
    written."""
    written, tensors = copy.deepcopy(model), {}
    for seed, (name, tensor) in enumerate(written.state_dict().items()):
        if not name.endswith(MATRICES):
            tensors[name] = tensor.clone()
            continue
        blocks, exponents = draw(*tensor.shape, seed)
        tensor.copy_(numbers(blocks, exponents).transpose(1, 2))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
    save(folder, model, SETTINGS if settings is None else settings, tensors)
    return written
