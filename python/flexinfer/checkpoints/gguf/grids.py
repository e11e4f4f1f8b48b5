"""Grids: blocks whose numbers are chosen four or eight at once, of a table of such vectors.

All numbers of a type are of a few magnitudes: 4 bits by a codebook hold them exactly, 4.3 to 4.56
bits a weight, where files have 1.6 to 3.4.

| type | numbers | groups |
|---|---|---|
| IQ2_XXS | +-1, +-3.125, +-5.375 | 32 |
| IQ2_XS, IQ2_S | the same | 16 |
| IQ3_XXS | +-1, +-3, ... +-13, +-15.5 | 32 |
| IQ3_S | +-1, +-3, ... +-15 | 32 |
| IQ1_S | -1, 0 and 1, all plus or all minus 0.125 | 32 |
| IQ1_M | the same | 16 |

A scale is an odd integer times the factor of a block of 256. The grids are those of the `gguf`
package. Source: ggml-quants.c of the ggml project.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch

from flexinfer.checkpoints.gguf.fields import factors_of, fields_of, words_of
from flexinfer.layers.codebook import Codebook
from flexinfer.layers.quantised import QuantisedTensor
from flexinfer.layers.scale_levels import ScaleLevels


@cache
def _grid(kind: str) -> torch.Tensor:
    """The vectors of a type, each an integer of 4 or 8 bytes: the places of its magnitudes."""
    from gguf import quants

    quantised = getattr(quants, kind)
    quantised.init_grid()
    vectors = quantised.grid.reshape(quantised.grid_shape)
    places = np.searchsorted(np.array(quantised.grid_map), vectors).astype(np.uint8)
    return torch.from_numpy(places).view(torch.int32 if places.shape[1] == 4 else torch.int64)[:, 0]


@cache
def _signs() -> torch.Tensor:
    """int64 [256]: of the bits of a byte, each 1 for a minus, what eight places are combined with
    to be integers: 16 numbers are eight and their negatives, integers are places less 8."""
    bits = torch.arange(256, dtype=torch.int16)[:, None] >> torch.arange(8, dtype=torch.int16) & 1
    return (bits * 8 - 8).to(torch.int8).view(torch.int64)[:, 0]


@cache
def _signs_of_7() -> torch.Tensor:
    """The same of 7 bits: there are as many minuses that their number is even."""
    from gguf import quants

    return _signs()[torch.tensor([*quants.IQ2_XXS.ksigns])]


def _integers(vectors: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """int8 [rows, depth] of grid's integers [rows, ...] of 4 or 8 bytes, and signs of 8."""
    vectors, signs = vectors.flatten(1), signs.flatten(1)
    return (vectors | signs.view(vectors.dtype)).view(torch.int8)


def _tensor(
    integers: torch.Tensor, scales: torch.Tensor, factors: torch.Tensor, codebook: Codebook
) -> QuantisedTensor:
    """scales: [rows, blocks, groups], each of s for 2 s + 1."""
    levels = ScaleLevels((2 * scales + 1).to(torch.int8).flatten(1), factors)
    group = integers.shape[1] // levels.integers.shape[1]
    return QuantisedTensor.in_levels(integers, 4, group, levels, codebook=codebook)


def _with_signs_of_7(
    places: torch.Tensor, words: torch.Tensor, factors: torch.Tensor, kind: str, codebook: Codebook
) -> QuantisedTensor:
    """words: int32 [rows, blocks, 8], of each 32 inputs four signs of 7 bits and a scale of 4."""
    signs = torch.stack([words >> shift for shift in (0, 7, 14, 21)], dim=-1) & 127
    integers = _integers(_grid(kind)[places.int()], _signs_of_7()[signs])
    return _tensor(integers, words >> 28 & 15, factors_of(factors), codebook)


def _iq2_xxs(blocks: torch.Tensor) -> QuantisedTensor:
    """A factor, and of each 32 inputs four places of a byte and a word of signs and a scale."""
    halves = torch.unflatten(blocks[..., 2:], -1, (8, 2, 4))
    words = words_of(halves[..., 1, :], torch.int32)[..., 0]
    return _with_signs_of_7(halves[..., 0, :], words, blocks[..., :2], "IQ2_XXS", Codebook.IQ2)


def _iq3_xxs(blocks: torch.Tensor) -> QuantisedTensor:
    """A factor, 64 places of a byte, and of each 32 inputs a word of signs and a scale."""
    words = words_of(blocks[..., 66:], torch.int32)
    return _with_signs_of_7(blocks[..., 2:66], words, blocks[..., :2], "IQ3_XXS", Codebook.IQ3_XXS)


def _iq2_xs(blocks: torch.Tensor) -> QuantisedTensor:
    """A factor, 32 places of 9 bits with 7 of signs above, 16 scales of 4 bits."""
    words = words_of(blocks[..., 2:66], torch.int16).int()
    integers = _integers(_grid("IQ2_XS")[words & 511], _signs_of_7()[words >> 9 & 127])
    scales = fields_of(blocks[..., 66:], 4, 1)
    return _tensor(integers, scales, factors_of(blocks[..., :2]), Codebook.IQ2)


def _iq2_s(blocks: torch.Tensor) -> QuantisedTensor:
    """A factor, 32 places, 32 bytes of signs, 2 upper bits of each place, 16 scales of 4 bits."""
    places = blocks[..., 2:34].int() | fields_of(blocks[..., 66:74], 2, 1).int() << 8
    integers = _integers(_grid("IQ2_S")[places], _signs()[blocks[..., 34:66].int()])
    scales = fields_of(blocks[..., 74:], 4, 1)
    return _tensor(integers, scales, factors_of(blocks[..., :2]), Codebook.IQ2)


def _iq3_s(blocks: torch.Tensor) -> QuantisedTensor:
    """A factor, 64 places, an upper bit of each, 32 bytes of signs, 8 scales of 4 bits."""
    places = blocks[..., 2:66].int() | fields_of(blocks[..., 66:74], 1, 1).int() << 8
    integers = _integers(_grid("IQ3_S")[places], _signs()[blocks[..., 74:106].int()])
    scales = fields_of(blocks[..., 106:], 4, 1)
    return _tensor(integers, scales, factors_of(blocks[..., :2]), Codebook.IQ3_S)


def _iq1_s(blocks: torch.Tensor) -> QuantisedTensor:
    """A factor, 32 places, and of each 32 inputs 16 bits: 3 upper ones of each place, a scale of
    3, and whether all numbers are less by an eighth, not more."""
    words = words_of(blocks[..., 34:], torch.int16).int()
    high = torch.stack([words >> shift for shift in (0, 3, 6, 9)], dim=-1) & 7
    places = blocks[..., 2:34].int() | high.flatten(2) << 8
    is_less = (words < 0).int().repeat_interleave(4, dim=-1)
    integers = _integers(_grid("IQ1_S")[places], _signs()[255 * is_less])
    return _tensor(integers, words >> 12 & 7, factors_of(blocks[..., :2]), Codebook.IQ1)


def _iq1_m(blocks: torch.Tensor) -> QuantisedTensor:
    """32 places, of each 3 upper bits and whether its numbers are less, four words of four scales
    of 3 bits, and above these the factor, 4 bits of each."""
    above = fields_of(blocks[..., 32:48], 4, 1).int()
    places = blocks[..., :32].int() | (above & 7) << 8
    integers = _integers(_grid("IQ1_S")[places], _signs()[255 * (above >> 3)])
    words = words_of(blocks[..., 48:], torch.int16).int()
    scales = torch.stack([words >> shift for shift in (0, 3, 6, 9)], dim=-1) & 7
    nibbles = words >> 12 & 15
    factors = (nibbles << torch.tensor([0, 4, 8, 12], dtype=torch.int32)).sum(-1).to(torch.int16)
    return _tensor(integers, scales.flatten(2), factors.view(torch.float16), Codebook.IQ1)


GRID_DECODERS: dict[str, Callable[[torch.Tensor], QuantisedTensor]] = {
    "IQ3_S": _iq3_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ2_S": _iq2_s,
    "IQ2_XS": _iq2_xs,
    "IQ2_XXS": _iq2_xxs,
    "IQ1_M": _iq1_m,
    "IQ1_S": _iq1_s,
}
"""Type of blocks -> what bytes [rows, blocks, bytes of a block] are."""
