"""Mamba-2 in GGUF files: what they say of its sizes, and what the converter does to its weights.

The rows of the projection into it are in the model's order, and stay as they are.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import torch

from flexinfer.checkpoints.gguf.sources import Changed, Source
from flexinfer.checkpoints.gguf.values import GgufValues
from flexinfer.errors import UnsupportedModelError

KERNEL, INNER, STATE = "ssm.conv_kernel", "ssm.inner_size", "ssm.state_size"
HEADS, GROUPS = "ssm.time_step_rank", "ssm.group_count"
KEYS = frozenset({KERNEL, INNER, STATE, HEADS, GROUPS})
PARTS = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_dt.bias": "dt_bias",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}
"""llama.cpp's name of a part -> which part of the mixer it is."""


def names_in(mixer: str) -> dict[str, str]:
    """Of an `Architecture`."""
    return {name: f"{mixer}.{part}" for name, part in PARTS.items()}


def head_dim_of(values: GgufValues) -> int:
    """Of the mixers' heads."""
    inner, heads = values.count(INNER), values.count(HEADS)
    if inner % heads:
        values.refuse(HEADS, f"only divisors of the {INNER}, {inner}")
    return inner // heads


def has_bias(values: GgufValues) -> bool:
    """Whether convolutions have one."""
    layers = range(values.count("block_count"))
    return any(values.shape(f"blk.{layer}.ssm_conv1d.bias") is not None for layer in layers)


def undo_mamba2(sources: dict[str, Source], config: Any) -> None:
    """Decays are the numbers that a step multiplies with, no logarithms; one number a head is a
    row, and the norm has a row for each group."""
    for name, source in sources.items():
        flat = (prod(source.shape),)
        if name.endswith(".A_log"):
            sources[name] = Changed(partial(_logarithms, name), source, shape=flat)
        elif name.endswith((".D", "mamba.norm.weight", "mixer.norm.weight")):
            sources[name] = Changed(torch.flatten, source, shape=flat)


def _logarithms(name: str, decays: torch.Tensor) -> torch.Tensor:
    """Raises UnsupportedModelError for growth, which no logarithm leads to."""
    if not bool((decays <= 0).all()):
        raise UnsupportedModelError(
            f"{name} cannot be read: the file has decays above 0 there, it is damaged"
        )
    return (-decays.float()).log().flatten()
