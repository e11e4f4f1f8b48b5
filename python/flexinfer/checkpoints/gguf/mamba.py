"""Mamba in GGUF files: what they say of its sizes, and what the converter does to its weights.

The rows of the projection into it, in Mamba-2, too, are in the model's order, and stay as they are.
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
"""Heads are those of Mamba-2; of Mamba it is the rank of time steps."""
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


def expansion_of(values: GgufValues) -> int:
    """How many times as wide as the model the mixers are."""
    inner, width = values.count(INNER), values.count("embedding_length")
    if inner % width:
        values.refuse(INNER, f"only multiples of the embedding_length, {width}")
    return inner // width


def has_bias(values: GgufValues) -> bool:
    """Whether convolutions have one."""
    layers = range(values.count("block_count"))
    return any(values.has_tensor(f"blk.{layer}.ssm_conv1d.bias") for layer in layers)


def undo_mamba(sources: dict[str, Source], config: Any) -> None:
    """Decays are the numbers that a step multiplies with, no logarithms."""
    for name, source in sources.items():
        if name.endswith(".A_log"):
            sources[name] = Changed(partial(_logarithms, name), source)


def undo_mamba2(sources: dict[str, Source], config: Any) -> None:
    """As in Mamba, but that one number a head is a row, and the norm has a row for each group."""
    undo_mamba(sources, config)
    for name, source in sources.items():
        flat = (prod(source.shape),)
        if name.endswith((".A_log", ".D", "mamba.norm.weight", "mixer.norm.weight")):
            sources[name] = Changed(torch.flatten, source, shape=flat)


def _logarithms(name: str, decays: torch.Tensor) -> torch.Tensor:
    """Raises UnsupportedModelError for growth, which no logarithm leads to."""
    if not bool((decays <= 0).all()):
        raise UnsupportedModelError(
            f"{name} cannot be read: the file has decays above 0 there, it is damaged"
        )
    return (-decays.float()).log()
