"""What llama.cpp's converter does to weights of several architectures, undone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flexinfer.checkpoints.gguf.sources import Changed, Ordered, Source, Woven
from flexinfer.errors import UnsupportedModelError

CONVOLUTIONS = ("conv.conv.weight", "conv1d.weight")


def part_pairs(sources: dict[str, Source], config: Any) -> None:
    """Rows of queries and keys: llama.cpp rotates neighbours together (0 with 1, 2 with 3);
    transformers rotates the first half of a head with the second (0 with n / 2, 1 with
    n / 2 + 1)."""
    for name, source in sources.items():
        if name.split(".")[-2] in ("q_proj", "k_proj"):
            if source.shape[0] % config.head_dim:
                raise UnsupportedModelError(
                    f"it has {name} of {source.shape[0]} rows; heads have {config.head_dim}"
                )
            rows = torch.arange(source.shape[0])
            order = rows.view(-1, config.head_dim // 2, 2).transpose(1, 2).flatten()
            sources[name] = Ordered(source, order)


def part_joined(sources: dict[str, Source], config: Any) -> None:
    """Queries, keys and values that are one tensor, as in some files."""
    counts = (config.num_attention_heads, *[config.num_key_value_heads] * 2)
    num_rows = sum(counts) * config.head_dim
    for name in [name for name in sources if name.split(".")[-2] == "qkv_proj"]:
        joined, first = sources.pop(name), 0
        if joined.shape[0] != num_rows:
            raise UnsupportedModelError(
                f"it has {name} of {joined.shape[0]} rows; there have to be {num_rows}"
            )
        for part, heads in zip("qkv", counts, strict=True):
            own, end = name.replace("qkv_proj", f"{part}_proj"), first + heads * config.head_dim
            if own in sources:
                raise UnsupportedModelError(f"it has {own} and {name}")
            sources[own] = Ordered(joined, torch.arange(first, end))
            first = end


def less_one(sources: dict[str, Source], config: Any) -> None:
    """Weights of norms are what is multiplied with, which is one more than in the model."""
    for name, source in sources.items():
        if name.endswith("norm.weight"):
            sources[name] = Changed(lambda weight: weight - 1, source)


def one_input(sources: dict[str, Source], config: Any) -> None:
    """Convolutions of each channel alone, whose weights have a dimension of one input."""
    for name, source in sources.items():
        if name.endswith(CONVOLUTIONS):
            shape = (source.shape[0], 1, *source.shape[1:])
            sources[name] = Changed(lambda weight: weight[:, None], source, shape=shape)


def join(sources: dict[str, Source], names: Sequence[str], whole: str) -> None:
    """Weights that are one in the model. None are joined where one is missing, or has other
    columns: the model then lacks it."""
    if not all(name in sources for name in names):
        return
    parts = [sources[name] for name in names]
    columns = {part.shape[1:] for part in parts}
    if len(columns) > 1:
        return
    for name in names:
        del sources[name]
    sources[whole] = Woven(parts, torch.arange(sum(part.shape[0] for part in parts)))
