"""QuantisedPanels: a quantised weight in the order in which the kernels read it.

cpp/kernels/calls/quantised.h says how words, scales and minimums stand there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from typing import NamedTuple

import torch

from flexinfer import _kernels
from flexinfer.layers.codebook import Codebook
from flexinfer.layers.quantised import QuantisedTensor
from flexinfer.layers.scale_levels import ScaleLevels
from flexinfer.runtime.kernels import CODEBOOKS, SCALE_BLOCK, SCALE_FORMATS
from flexinfer.runtime.pieces import of_pieces

PANEL_COLUMNS = 64
STEP_INPUTS = {8: 4, 6: 16, 4: 8}
"""By bits: the fewest inputs whose integers fill whole words."""
SMALL_SCALES = (torch.float8_e8m0fnu, torch.float16)
"""Formats that some scales are exact in: the best first."""


class Kind(NamedTuple):
    """What the words of a weight stand for."""

    bits: int
    group: int
    byte_inputs: bool
    depth: int
    num_levels: int
    """Tables of scales and minimums that are in two levels: all of them, or none."""
    codebook: Codebook | None


def kind_of(source: QuantisedTensor) -> Kind:
    depth = source.integers.shape[1]
    form = source.bits, source.group, source.byte_inputs
    return Kind(*form, depth, len(source.levels), source.codebook)


class QuantisedPanels:
    """The numbers of one weight, of which nothing else is kept."""

    def __init__(self, source: QuantisedTensor) -> None:
        """source: copied."""
        self._kind = kind_of(source)
        self.words = words_of(source)
        panels = _scales_of(source)
        self.scales, self.minimums = panels[0], panels[1] if len(panels) > 1 else None
        self.sums = None
        if source.group == 0:
            # In pieces, as torch makes integers of 32 bits of all that it adds.
            integers, (rows, depth) = source.integers, source.integers.shape
            sums = of_pieces(lambda some: integers[some].sum(1, dtype=torch.int32), rows, 4 * depth)
            self.sums = in_panels(128 * torch.cat(sums)[:, None])

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """Those that there are, by their names."""
        parts = {"words": self.words, "scales": self.scales}
        if self.minimums is not None:
            parts["minimums"] = self.minimums
        return parts if self.sums is None else {**parts, "sums": self.sums}

    @property
    def nbytes(self) -> int:
        """Of the weight with its scales."""
        return sum(part.nbytes for part in self.parts.values())

    def rows(self, outputs: torch.Tensor) -> QuantisedTensor:
        """What they were made of: its rows for some outputs, int64 [n], each one that there is."""
        panel, column = outputs // PANEL_COLUMNS, outputs % PANEL_COLUMNS
        bits, group, byte_inputs, depth, num_levels, codebook = self._kind
        words = torch.unflatten(self.words.view(torch.uint8), 3, (PANEL_COLUMNS, 4))
        steps = _unpack(words[panel, :, :, column], bits, _is_from_zero(bits, group, byte_inputs))
        integers = steps.reshape(len(outputs), depth)
        if num_levels:
            tables = [n for n in (self.scales, self.minimums) if n is not None]
            levels = [_levels_at(n, panel, column, depth, group) for n in tables]
            source = QuantisedTensor.in_levels(integers, bits, group, *levels, codebook=codebook)
            return replace(source, byte_inputs=byte_inputs)
        scales = self.scales[panel, :, column].float()
        minimums = None if self.minimums is None else self.minimums[panel, :, column].float()
        numbers = scales, minimums, bits, group, byte_inputs
        return QuantisedTensor(integers, *numbers, codebook=codebook)


def kernel_weight(
    kind: Kind, parts: Mapping[str, torch.Tensor], columns: int
) -> _kernels.QuantisedWeight:
    """As the kernels take it, while the parts live. columns: a multiple of what they write."""
    minimums, sums = parts.get("minimums"), parts.get("sums")
    return _kernels.QuantisedWeight(
        words=parts["words"].data_ptr(),
        scales=parts["scales"].data_ptr(),
        minimums=0 if minimums is None else minimums.data_ptr(),
        sums=0 if sums is None else sums.data_ptr(),
        scale_format=SCALE_FORMATS[parts["scales"].dtype],
        byte_inputs=kind.byte_inputs,
        bits=kind.bits,
        group=kind.group,
        depth=kind.depth,
        columns=columns,
        codebook=CODEBOOKS[kind.codebook.name if kind.codebook else ""],
    )


def _scales_of(source: QuantisedTensor) -> list[torch.Tensor]:
    """Scales and, if there are any, minimums, in the smallest format that holds them."""
    if source.levels:
        return [_levels_in_panels(level) for level in source.levels]
    numbers = source.numbers
    dtype = torch.float32
    if source.group > 0:
        dtype = next((d for d in SMALL_SCALES if all(_is_exact(n, d) for n in numbers)), dtype)
    return [in_panels(n).to(dtype) for n in numbers]


def _is_exact(numbers: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the format has all of them; kernels take the least of powers of two for zero."""
    if dtype == torch.float8_e8m0fnu and bool((numbers < torch.finfo(torch.float32).tiny).any()):
        return False
    return torch.equal(numbers.to(dtype).float(), numbers)


def _levels_in_panels(levels: ScaleLevels) -> torch.Tensor:
    """uint8 [panels, bytes]: of each its factors, then its integers."""
    parts = [in_panels(part).flatten(1).view(torch.uint8) for part in reversed(levels)]
    return torch.cat(parts, dim=1)


def _levels_at(
    panels: torch.Tensor, panel: torch.Tensor, column: torch.Tensor, depth: int, group: int
) -> ScaleLevels:
    """Of some outputs, of what `_levels_in_panels` gives."""
    blocks, groups = depth // SCALE_BLOCK, depth // group
    factors, integers = torch.split(
        panels, [2 * blocks * PANEL_COLUMNS, groups * PANEL_COLUMNS], dim=1
    )
    factors = torch.unflatten(factors.view(torch.float16), 1, (blocks, PANEL_COLUMNS))
    integers = torch.unflatten(integers.view(torch.int8), 1, (groups, PANEL_COLUMNS))
    return ScaleLevels(integers[panel, :, column], factors[panel, :, column])


def words_of(source: QuantisedTensor) -> torch.Tensor:
    """int32 [panels, steps, words of a step, 64], as cpp/kernels/calls/quantised.h says."""
    inputs, bits = STEP_INPUTS[source.bits], source.bits
    integers = source.integers.contiguous()
    columns, depth = integers.shape
    if depth % inputs or (source.group and source.group % inputs):
        raise ValueError(
            f"a weight of {bits} bits needs inputs and groups that are multiples of "
            f"{inputs}, got {depth} and {source.group}"
        )
    panels, num_words = -(-columns // PANEL_COLUMNS), inputs * bits // 32
    words = torch.empty(panels, depth // inputs, num_words, PANEL_COLUMNS, dtype=torch.int32)
    from_zero = _is_from_zero(bits, source.group, source.byte_inputs)

    def write(some: slice) -> bool:
        own, panel = integers[some], words[some.start // PANEL_COLUMNS :]
        return _kernels.write_words(
            own.data_ptr(), len(own), depth, bits, from_zero, panel.data_ptr()
        )

    if not all(of_pieces(write, columns, depth, PANEL_COLUMNS)):
        raise ValueError(f"a weight of {bits} bits has {integers.min()} to {integers.max()} in it")
    return words


def _is_from_zero(bits: int, group: int, byte_inputs: bool) -> bool:
    """Whether words hold integers from 0 on."""
    return bits < 8 or (group > 0 and byte_inputs)


def _unpack(words: torch.Tensor, bits: int, from_zero: bool) -> torch.Tensor:
    """int8 [columns, steps, inputs] of words uint8 [columns, steps, words, 4]."""
    if bits < 8:
        first, above = words & (1 << bits) - 1, words >> bits
        pieces = [above[:, :, i] << i * (8 - bits) for i in range(words.shape[2])]
        rest = reduce(torch.bitwise_or, pieces).unsqueeze(2)
        fours = torch.cat([first, rest], dim=2)
        words = torch.unflatten(fours.flatten(2), 2, (-1, 4, 2)).transpose(3, 4)
    integers = words.view(torch.int8)
    return integers - (1 << bits - 1) if from_zero else integers


def in_panels(numbers: torch.Tensor) -> torch.Tensor:
    """[panels, groups, 64] of [columns, groups]; zeros fill the last panel."""
    columns, groups = numbers.shape
    numbers = torch.nn.functional.pad(numbers, (0, 0, 0, -columns % PANEL_COLUMNS))
    return numbers.view(-1, PANEL_COLUMNS, groups).transpose(1, 2).contiguous()
