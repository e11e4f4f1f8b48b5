"""The optimizers of a small Llama, and their rates over a training."""

from __future__ import annotations

import math

import torch
from transformers import LlamaForCausalLM


def build_optimizers(
    model: LlamaForCausalLM, muon_rate: float, adam_rate: float
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    inner = [p for p in model.model.layers.parameters() if p.ndim == 2]
    chosen = {id(p) for p in inner}
    other = [p for p in model.parameters() if id(p) not in chosen]
    adam = torch.optim.AdamW(other, lr=adam_rate, betas=(0.9, 0.95), weight_decay=0.0)
    if not muon_rate:
        adam.add_param_group({"params": inner, "weight_decay": 0.05})
        return [adam]
    muon = torch.optim.Muon(inner, lr=muon_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    return [adam, muon]


def rate_factor(progress: float, warmup: float = 0.01) -> float:
    """Linear warm-up, a plateau, then a cosine decay to two per cent."""
    if progress < warmup:
        return (progress + 1e-4) / warmup
    decay = min(max((progress - 0.3) / 0.7, 0.0), 1.0)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * decay))
