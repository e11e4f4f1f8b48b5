"""LoRA adapters in folders as PEFT writes them, and models with an adapter merged into them."""

from __future__ import annotations

import copy
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from flexinfer import LoRARequest
from flexinfer.cli.settings import SHIPPED_MODEL
from helpers.tiny_models import continue_prompt, make_model

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def draw_adapter(
    model: Any, targets: tuple[str, ...], rank: int, seed: int
) -> dict[str, torch.Tensor]:
    """A and B of each targeted layer, wide enough to change the answers."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path, module in model.named_modules():
        if path.rpartition(".")[2] in targets:
            width, depth = module.weight.shape
            if not isinstance(module, torch.nn.Linear):  # Conv1D
                width, depth = depth, width
            name = f"base_model.model.{path}.lora_"
            tensors[f"{name}A.weight"] = torch.randn(rank, depth, generator=generator) * 0.2
            tensors[f"{name}B.weight"] = torch.randn(width, rank, generator=generator) * 0.2
    return tensors


def write_config(folder: Path, targets: tuple[str, ...], rank: int, **config: Any) -> None:
    """adapter_config.json, with these fields in place of the usual ones."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(targets),
        "bias": "none",
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields))


def save_adapter(
    folder: Path,
    model_name: str = "llama",
    targets: tuple[str, ...] = ALL,
    rank: int = 4,
    seed: int = 1,
    **config: Any,
) -> Path:
    """config: fields of adapter_config.json."""
    write_config(folder, targets, rank, **{"base_model_name_or_path": model_name, **config})
    tensors = draw_adapter(make_model(model_name), targets, rank, seed)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def save_shipped_adapter(folder: Path, seed: int = 1) -> Path:
    """One of the shipped model that changes what it says."""
    from transformers import AutoModelForCausalLM

    targets = ("q_proj", "v_proj", "down_proj")
    model = AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL)
    write_config(folder, targets, rank=4)
    save_file(draw_adapter(model, targets, 4, seed), folder / "adapter_model.safetensors")
    return folder


@cache
def merged_model(model_name: str, folder: Path) -> Any:
    """The model with W + scaling B A in the place of W."""
    from safetensors.torch import load_file

    model = copy.deepcopy(make_model(model_name))
    config = json.loads((folder / "adapter_config.json").read_text())
    rank = config["r"]
    scaling = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    tensors = load_file(folder / "adapter_model.safetensors")
    with torch.no_grad():
        for name, a in tensors.items():
            if name.endswith("lora_A.weight"):
                path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                update = scaling * tensors[name.replace("lora_A", "lora_B")] @ a
                module = model.get_submodule(path)
                is_linear = isinstance(module, torch.nn.Linear)
                module.weight += update if is_linear else update.t()
    return model


def merged_reference(
    model_name: str, folder: Path | None, prompt: list[int], num_new: int
) -> list[int]:
    """What transformers says with this adapter, or with none."""
    model = make_model(model_name) if folder is None else merged_model(model_name, folder)
    return continue_prompt(model, tuple(prompt), num_new)


def request_for(folder: Path | None, number: int) -> LoRARequest | None:
    return None if folder is None else LoRARequest(folder.name, number, str(folder))
