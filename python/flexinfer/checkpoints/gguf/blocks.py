"""What the blocks of a GGUF file are as integers and scales: exactly the numbers of the file.

docs/quantisation.md has a table of all types. Words of kernels have 4, 6 or 8 bits: integers of
others stand in the next wider ones. Source: ggml-quants.c of the ggml project, and gguf/quants.py,
which the tests compare with.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from flexinfer.checkpoints.gguf.fields import factors_of, fields_of, levels_of
from flexinfer.checkpoints.gguf.grids import GRID_DECODERS
from flexinfer.checkpoints.gguf.header import BLOCKS
from flexinfer.checkpoints.mxfp4 import mxfp4_tensor
from flexinfer.layers.codebook import Codebook
from flexinfer.layers.quantised import QuantisedTensor
from flexinfer.layers.scale_levels import ScaleLevels


def _less(integers: torch.Tensor, zero: int) -> torch.Tensor:
    """int8 [rows, depth] of uint8 [rows, blocks, numbers of a block], less what stands for 0."""
    return (integers.to(torch.int8) - zero).flatten(1)


def _in_groups(
    integers: torch.Tensor, bits: int, factors: torch.Tensor, lowest: torch.Tensor | None = None
) -> QuantisedTensor:
    """integers: of 4 or 5 bits from 0 on, of which the middle stands for 0. lowest: the bytes of
    what is added to each, beside those of the factors."""
    scales, minimums = factors_of(factors).float(), None
    zero = 1 << bits - 1
    if lowest is not None:
        minimums = factors_of(lowest).float() + zero * scales
    return QuantisedTensor(_less(integers, zero), scales, minimums, 4 if bits == 4 else 6, 32)


def _q8_0(blocks: torch.Tensor) -> QuantisedTensor:
    integers = blocks[..., 2:].contiguous().view(torch.int8).flatten(1)
    return QuantisedTensor(integers, factors_of(blocks[..., :2]).float(), None, 8, 32)


def _q5_0(blocks: torch.Tensor) -> QuantisedTensor:
    """A factor, 32 bits, 32 integers of 4 bits below them."""
    return _in_groups(_five_bits(blocks[..., 2:]), 5, blocks[..., :2])


def _q5_1(blocks: torch.Tensor) -> QuantisedTensor:
    return _in_groups(_five_bits(blocks[..., 4:]), 5, blocks[..., :2], blocks[..., 2:4])


def _five_bits(blocks: torch.Tensor) -> torch.Tensor:
    return fields_of(blocks[..., 4:], 4, 16) | fields_of(blocks[..., :4], 1, 1) << 4


def _q4_0(blocks: torch.Tensor) -> QuantisedTensor:
    return _in_groups(fields_of(blocks[..., 2:], 4, 16), 4, blocks[..., :2])


def _q4_1(blocks: torch.Tensor) -> QuantisedTensor:
    return _in_groups(fields_of(blocks[..., 4:], 4, 16), 4, blocks[..., :2], blocks[..., 2:4])


def _iq4_nl(blocks: torch.Tensor) -> QuantisedTensor:
    factors = factors_of(blocks[..., :2]).float()
    integers = _less(fields_of(blocks[..., 2:], 4, 16), 8)
    return QuantisedTensor(integers, factors, None, 4, 32, codebook=Codebook.IQ4)


def _mxfp4(blocks: torch.Tensor) -> QuantisedTensor:
    """An exponent, 32 places in a table."""
    return mxfp4_tensor(fields_of(blocks[..., 1:], 4, 16).flatten(1), blocks[..., 0])


def _q2_k(blocks: torch.Tensor) -> QuantisedTensor:
    """16 bytes of a scale and a minimum of 4 bits each, 256 integers of 2 bits, two factors."""
    scales, integers = blocks[..., :16], fields_of(blocks[..., 16:80], 2, 32)
    levels = levels_of(scales & 15, blocks[..., 80:82]), levels_of(scales >> 4, blocks[..., 82:])
    # The file has scale * n - minimum for n from 0 on; our integers are n - 8, and n - 32 of Q5_K.
    return QuantisedTensor.in_levels(_less(integers, 8), 4, 16, *levels)


def _q3_k(blocks: torch.Tensor) -> QuantisedTensor:
    """256 bits, 256 integers of 2 bits below them, 16 scales of 6 bits, a factor."""
    integers = fields_of(blocks[..., 32:96], 2, 32) | fields_of(blocks[..., :32], 1, 32) << 2
    low, high = fields_of(blocks[..., 96:104], 4, 8), fields_of(blocks[..., 104:108], 2, 4)
    scales = (low | high << 4).to(torch.int8) - 32
    levels = levels_of(scales, blocks[..., 108:])
    return QuantisedTensor.in_levels(_less(integers, 4), 4, 16, levels)


def _q4_k(blocks: torch.Tensor) -> QuantisedTensor:
    integers = _less(fields_of(blocks[..., 16:], 4, 32), 8)
    return QuantisedTensor.in_levels(integers, 4, 32, *_levels_of_6_bits(blocks))


def _q5_k(blocks: torch.Tensor) -> QuantisedTensor:
    """As Q4_K, with 256 bits above the others between."""
    integers = fields_of(blocks[..., 48:], 4, 32) | fields_of(blocks[..., 16:48], 1, 32) << 4
    return QuantisedTensor.in_levels(_less(integers, 32), 6, 32, *_levels_of_6_bits(blocks))


def _levels_of_6_bits(blocks: torch.Tensor) -> tuple[ScaleLevels, ScaleLevels]:
    """Two factors, 8 scales and 8 minimums of 6 bits in 12 bytes."""
    first, second, third = torch.unflatten(blocks[..., 4:16], -1, (3, 4)).unbind(-2)
    scales = torch.cat([first & 63, third & 15 | first >> 2 & 48], dim=-1)
    minimums = torch.cat([second & 63, third >> 4 | second >> 2 & 48], dim=-1)
    return levels_of(scales, blocks[..., :2]), levels_of(minimums, blocks[..., 2:4])


def _q6_k(blocks: torch.Tensor) -> QuantisedTensor:
    """256 lower halves of 4 bits, 256 upper ones of 2, 16 scales of 8 bits, a factor."""
    integers = fields_of(blocks[..., :128], 4, 64) | fields_of(blocks[..., 128:192], 2, 32) << 4
    levels = levels_of(blocks[..., 192:208], blocks[..., 208:])
    return QuantisedTensor.in_levels(_less(integers, 32), 6, 16, levels)


def _iq4_xs(blocks: torch.Tensor) -> QuantisedTensor:
    """A factor, 8 scales of 6 bits: 2 upper ones in two bytes, then 4 lower ones in four; and 256
    integers of 4 bits."""
    low, high = fields_of(blocks[..., 4:8], 4, 1), fields_of(blocks[..., 2:4], 2, 1)
    levels = levels_of((low | high << 4).to(torch.int8) - 32, blocks[..., :2])
    integers = _less(fields_of(blocks[..., 8:], 4, 16), 8)
    return QuantisedTensor.in_levels(integers, 4, 32, levels, codebook=Codebook.IQ4)


def _tq2_0(blocks: torch.Tensor) -> QuantisedTensor:
    """256 integers of 2 bits, a factor."""
    return _ternary(fields_of(blocks[..., :64], 2, 32), blocks[..., 64:])


def _tq1_0(blocks: torch.Tensor) -> QuantisedTensor:
    """256 digits to the base 3, a factor. A byte is a fraction of 256 that has five of them."""
    parts = []
    for first, end, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        powers = 3 ** torch.arange(count, dtype=torch.uint8)
        rest = blocks[..., None, first:end] * powers[:, None]  # what is left of 256
        parts.append((rest.short() * 3 >> 8).flatten(2))
    return _ternary(torch.cat(parts, dim=-1), blocks[..., 52:])


def _ternary(integers: torch.Tensor, factors: torch.Tensor) -> QuantisedTensor:
    """integers: from 0 to 2, of which 1 stands for 0."""
    return QuantisedTensor(_less(integers, 1), factors_of(factors).float(), None, 4, 256)


DECODERS: dict[str, Callable[[torch.Tensor], QuantisedTensor]] = {
    "Q8_0": _q8_0,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "MXFP4": _mxfp4,
    "IQ4_NL": _iq4_nl,
    "Q6_K": _q6_k,
    "Q5_K": _q5_k,
    "Q4_K": _q4_k,
    "Q3_K": _q3_k,
    "Q2_K": _q2_k,
    "IQ4_XS": _iq4_xs,
    "TQ2_0": _tq2_0,
    "TQ1_0": _tq1_0,
    **GRID_DECODERS,
}
"""Type of blocks -> what bytes [rows, blocks, bytes of a block] are."""


def decode(kind: str, rows: torch.Tensor) -> QuantisedTensor:
    """rows: uint8 [rows, bytes]"""
    return DECODERS[kind](torch.unflatten(rows, 1, (-1, BLOCKS[kind][1])))
