"""What the blocks of a GGUF file are as integers and scales: exactly the numbers of the file.

| type | here | bits a weight in the file, here |
|---|---|---|
| Q8_0 | 8 bits, groups of 32 | 8.5, 8.5 |
| Q4_0 | 4 bits, groups of 32 | 4.5, 4.5 |
| Q4_K | 4 bits, groups of 32, with minimums; scales in two levels | 4.5, 4.625 |
| Q6_K | 6 bits, groups of 16; scales in two levels | 6.5625, 6.5625 |

Source: ggml-quants.c of the ggml project, and gguf/quants.py, which the tests compare with.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from flexinfer.layers.quantised import QuantisedTensor
from flexinfer.layers.scale_levels import ScaleLevels


def _halves(blocks: torch.Tensor) -> torch.Tensor:
    """float16 [rows, blocks] of their bytes."""
    return blocks.contiguous().view(torch.float16)[..., 0]


def _levels(integers: torch.Tensor, factors: torch.Tensor) -> ScaleLevels:
    """Bytes [rows, blocks, groups], and the two of each block's factor."""
    integers = integers.contiguous().view(torch.int8)
    return ScaleLevels(integers.view(len(integers), -1), _halves(factors))


def _split(rows: torch.Tensor, *shape: int) -> torch.Tensor:
    """The last dimension as several."""
    return rows.reshape(*rows.shape[:-1], *shape)


def _nibbles(rows: torch.Tensor) -> torch.Tensor:
    """[..., 2, n] of bytes [..., n]: their lower halves, then their upper ones, less 8."""
    return torch.stack([rows & 15, rows >> 4], dim=-2).to(torch.int8) - 8


def _q8_0(blocks: torch.Tensor) -> QuantisedTensor:
    rows = blocks.shape[0]
    integers = blocks[..., 2:].contiguous().view(torch.int8).view(rows, -1)
    return QuantisedTensor(integers, _halves(blocks[..., :2]).float(), None, 8, 32)


def _q4_0(blocks: torch.Tensor) -> QuantisedTensor:
    rows = blocks.shape[0]
    integers = _nibbles(blocks[..., 2:]).view(rows, -1)
    return QuantisedTensor(integers, _halves(blocks[..., :2]).float(), None, 4, 32)


def _q4_k(blocks: torch.Tensor) -> QuantisedTensor:
    """Two float16 factors, 8 scales and 8 minimums of 6 bits in 12 bytes, 256 nibbles."""
    first, second, third = _split(blocks[..., 4:16], 3, 4).unbind(-2)
    scales = torch.cat([first & 63, third & 15 | first >> 2 & 48], dim=-1)
    minimums = torch.cat([second & 63, third >> 4 | second >> 2 & 48], dim=-1)
    integers = _nibbles(_split(blocks[..., 16:], 4, 32)).view(len(blocks), -1)
    # The file has scale * n - minimum for n from 0 to 15; our integers are n - 8.
    levels = _levels(scales, blocks[..., :2]), _levels(minimums, blocks[..., 2:4])
    return QuantisedTensor.in_levels(integers, 4, 32, *levels)


def _q6_k(blocks: torch.Tensor) -> QuantisedTensor:
    """256 lower halves of 4 bits, 256 upper ones of 2, 16 scales of 8 bits, a float16 factor."""
    low = _split(blocks[..., :128], 2, 64)
    low = _split(torch.stack([low & 15, low >> 4], dim=-2).flatten(-3), 2, 4, 32)
    high = _split(blocks[..., 128:192], 2, 1, 32)
    high = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], dim=-2)
    integers = (low | high << 4).to(torch.int8) - 32
    scales = _levels(blocks[..., 192:208], blocks[..., 208:])
    return QuantisedTensor.in_levels(integers.view(len(blocks), -1), 6, 16, scales)


DECODERS: dict[str, tuple[int, Callable[[torch.Tensor], QuantisedTensor]]] = {
    "Q8_0": (34, _q8_0),
    "Q4_0": (18, _q4_0),
    "Q4_K": (144, _q4_k),
    "Q6_K": (210, _q6_k),
}
"""Bytes of a block, and what rows of them are."""


def decode(kind: str, rows: torch.Tensor) -> QuantisedTensor:
    """rows: uint8 [rows, bytes]"""
    block_bytes, decoder = DECODERS[kind]
    return decoder(rows.view(len(rows), -1, block_bytes))
