"""Fields: what the bytes of blocks hold, as tensors."""

from __future__ import annotations

import torch

from flexinfer.layers.scale_levels import ScaleLevels


def factors_of(blocks: torch.Tensor) -> torch.Tensor:
    """float16 [rows, blocks] of their bytes."""
    return blocks.contiguous().view(torch.float16)[..., 0]


def levels_of(integers: torch.Tensor, factors: torch.Tensor) -> ScaleLevels:
    """Bytes [rows, blocks, groups], and the two of each block's factor."""
    return ScaleLevels(integers.view(torch.int8).flatten(1), factors_of(factors))


def fields_of(rows: torch.Tensor, bits: int, chunk: int) -> torch.Tensor:
    """[..., n] integers of so many bits of bytes [..., n * bits / 8]: of each chunk of bytes their
    lowest bits, then the next ones, and so on."""
    rows = torch.unflatten(rows, -1, (-1, 1, chunk))
    shifted = torch.cat([rows >> shift for shift in range(0, 8, bits)], dim=-2)
    return (shifted & (1 << bits) - 1).flatten(-3)


def words_of(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Their bytes as integers of more of them: of a copy, as a single block may lie anywhere."""
    return blocks.clone(memory_format=torch.contiguous_format).view(dtype)
