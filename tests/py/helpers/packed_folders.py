"""Tiny checkpoints in the formats of GPTQ, AWQ and compressed-tensors, packed as their authors
describe them, number by number."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output that stands in bits 4 i to 4 i + 3."""


@dataclass(frozen=True)
class Numbers:
    """A weight (numbers - zeros) * scales."""

    numbers: torch.Tensor
    """int64 [outputs, inputs], from 0 on"""
    zeros: torch.Tensor
    """int64 [outputs, groups]"""
    scales: torch.Tensor
    """float16 [outputs, groups]"""

    def weight(self) -> torch.Tensor:
        outputs, groups = self.zeros.shape
        grouped = self.numbers.view(outputs, groups, -1) - self.zeros[:, :, None]
        return (grouped.double() * self.scales.double()[:, :, None]).view(outputs, -1).float()


def draw_numbers(
    outputs: int, inputs: int, group: int, bits: int, is_symmetric: bool, seed: int
) -> Numbers:
    generator = torch.Generator().manual_seed(seed)
    groups, top = inputs // group, 1 << bits
    zeros = torch.randint(0, top, (outputs, groups), generator=generator)
    if is_symmetric:
        zeros = torch.full_like(zeros, top // 2)
    numbers = torch.randint(0, top, (outputs, inputs), generator=generator)
    scales = (0.5 + torch.rand(outputs, groups, generator=generator)) / top
    return Numbers(numbers, zeros, scales.half())


def pack(numbers: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """int32 [..., n / k] of [..., n]: number order[i] of each k in bits i * bits and on."""
    k = 32 // bits
    order = order or tuple(range(k))
    groups = numbers.reshape(*numbers.shape[:-1], -1, k)
    words = sum(groups[..., order[i]] << (bits * i) for i in range(k))
    assert isinstance(words, torch.Tensor)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).contiguous()


def gptq(of: Numbers, bits: int, less: int = 1) -> dict[str, torch.Tensor]:
    inputs, groups = of.numbers.shape[1], of.zeros.shape[1]
    return {
        "qweight": pack(of.numbers, bits).T.contiguous(),
        "qzeros": pack(((of.zeros - less) % (1 << bits)).T, bits),
        "scales": of.scales.T.contiguous(),
        "g_idx": (torch.arange(inputs) // (inputs // groups)).int(),
    }


def awq(of: Numbers) -> dict[str, torch.Tensor]:
    return {
        "qweight": pack(of.numbers.T, 4, AWQ_ORDER),
        "qzeros": pack(of.zeros.T, 4, AWQ_ORDER),
        "scales": of.scales.T.contiguous(),
    }


def compressed(of: Numbers, bits: int, is_symmetric: bool) -> dict[str, torch.Tensor]:
    parts = {
        "weight_packed": pack(of.numbers, bits),
        "weight_scale": of.scales.clone(),
        "weight_shape": torch.tensor(of.numbers.shape),
    }
    if not is_symmetric:
        parts["weight_zero_point"] = pack(of.zeros.T, bits).T.contiguous()
    return parts


def compressed_bytes(of: Numbers) -> dict[str, torch.Tensor]:
    return {
        "weight": (of.numbers - 128).to(torch.int8),
        "weight_scale": of.scales.clone(),
    }


def write_folder(
    folder: Path,
    model: Any,
    settings: dict[str, Any],
    draw: Callable[[int, int, int], Numbers],
    parts_of: Callable[[Numbers], dict[str, torch.Tensor]],
    *,
    has_head: bool = False,
) -> Any:
    """Write the model with all linear layers quantised, the head if `has_head`; returns a copy of
    it with the numbers that were written. draw: (outputs, inputs, seed)."""
    written, tensors = copy.deepcopy(model), {}
    for name, tensor in written.state_dict().items():
        if not (name.endswith("_proj.weight") or (has_head and name == "lm_head.weight")):
            tensors[name] = tensor.clone()
            continue
        numbers = draw(*tensor.shape, len(tensors))
        tensor.copy_(numbers.weight())
        path = name.removesuffix(".weight")
        tensors |= {f"{path}.{part}": value for part, value in parts_of(numbers).items()}
    save(folder, model, settings, tensors)
    return written


def write_experts(
    folder: Path,
    model: Any,
    settings: dict[str, Any],
    draw: Callable[[int, int, int], Numbers],
    parts_of: Callable[[Numbers], dict[str, torch.Tensor]],
    *,
    has_plain_experts: bool = False,
) -> Any:
    """As `write_folder`, a mixture of experts: each has tensors of its own, as published folders
    have them. has_plain_experts: those are not quantised."""
    written, tensors = copy.deepcopy(model), {}
    is_mixtral = model.config.model_type == "mixtral"

    def add(name: str, weight: torch.Tensor, is_quantised: bool) -> None:
        path = name.replace(".mlp.", ".block_sparse_moe.") if is_mixtral else name
        if model.config.model_type == "nemotron_h":
            path = path.replace("model.", "backbone.", 1)
        if not is_quantised:
            tensors[path] = weight.clone()
            return
        numbers = draw(*weight.shape, len(tensors))
        weight.copy_(numbers.weight())
        path = path.removesuffix(".weight")
        tensors.update({f"{path}.{part}": value for part, value in parts_of(numbers).items()})

    for name, tensor in written.state_dict().items():
        if ".experts." not in name:
            add(name, tensor, name.endswith("_proj.weight"))
            continue
        path, _, kind = name.rpartition(".")
        for expert, weight in enumerate(tensor):
            parts = ("gate", "up") if kind == "gate_up_proj" else (kind.removesuffix("_proj"),)
            own = dict(zip(parts, weight.chunk(len(parts)), strict=True))
            for part, values in own.items():
                short = {"gate": "w1", "down": "w2", "up": "w3"}[part]
                last = short if is_mixtral else f"{part}_proj"
                add(f"{path}.{expert}.{last}.weight", values, not has_plain_experts)
    save(folder, model, settings, tensors)
    return written


def save(folder: Path, model: Any, settings: dict[str, Any], tensors: dict[str, Any]) -> None:
    """A folder with these tensors, and the config of the model with these settings."""
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """change: what it does to the tensors by their names."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
