"""QuantisedPanels: a quantised weight in the order in which the kernels read it.

cpp/kernels/calls/quantised.h says how words, scales and minimums stand there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce

import torch

from flexinfer import _kernels
from flexinfer.layers.quantised import QuantisedTensor, QuantisedWeight, TensorKind
from flexinfer.layers.scale_levels import ScaleLevels
from flexinfer.runtime.kernels import SCALE_BLOCK, SCALE_FORMATS
from flexinfer.runtime.pieces import of_pieces

PANEL_COLUMNS = 64
STEP_INPUTS = {8: 4, 6: 16, 4: 8}
"""By bits: the fewest inputs whose integers fill whole words."""
SMALL_SCALES = (torch.float8_e8m0fnu, torch.float16)
"""Formats that some scales are exact in: the best first."""


class QuantisedPanels:
    """The numbers of one weight, of which nothing else is kept."""

    def __init__(self, source: QuantisedWeight) -> None:
        """source: copied."""
        self.kind = source.kind
        (columns, depth), inputs = source.shape, STEP_INPUTS[self.kind.bits]
        if depth % inputs or self.kind.group % inputs:
            raise ValueError(
                f"a weight of {self.kind.bits} bits needs inputs and groups that are multiples of "
                f"{inputs}, got {depth} and {self.kind.group}"
            )
        panels, num_words = -(-columns // PANEL_COLUMNS), inputs * self.kind.bits // 32
        shape = panels, depth // inputs, num_words, PANEL_COLUMNS
        self.words = torch.empty(shape, dtype=torch.int32)
        """As cpp/kernels/calls/quantised.h says."""
        tables = [t.new_empty(columns, t.shape[1]) for t in _beside_integers(source[:1])]

        def lay_out(some: slice) -> None:
            part = source[some]
            _write_words(part, self.words[some.start // PANEL_COLUMNS :])
            for table, numbers in zip(tables, _beside_integers(part), strict=True):
                table[some] = numbers

        of_pieces(lay_out, columns, depth, PANEL_COLUMNS)
        scales = _scales_in_panels(self.kind, tables)
        self.scales, self.minimums = scales[0], scales[1] if len(scales) > 1 else None
        self.sums = in_panels(128 * tables[-1]) if self.kind.group == 0 else None

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
        bits, group, _, byte_inputs, depth, num_levels, codebook, is_rotated = self.kind
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
        return QuantisedTensor(integers, *numbers, codebook=codebook, is_rotated=is_rotated)


def kernel_weight(
    kind: TensorKind, parts: Mapping[str, torch.Tensor], columns: int
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
        codebook=kind.codebook.numbers if kind.codebook else None,
        factor_unit=kind.codebook.factor_unit if kind.codebook else 1.0,
        rotates_inputs=kind.is_rotated,
    )


def _beside_integers(source: QuantisedTensor) -> list[torch.Tensor]:
    """Scales and, if there are any, minimums [columns, ...], each in levels two; and int32
    [columns, 1], the sums of integers with one scale."""
    tables = [part for level in source.levels for part in level] or source.numbers
    if source.group:
        return tables
    return [*tables, source.integers.sum(1, keepdim=True, dtype=torch.int32)]


def _scales_in_panels(kind: TensorKind, tables: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of those of `_beside_integers`, in the smallest format that holds them."""
    if kind.num_levels:
        pairs = zip(tables[::2], tables[1::2], strict=True)
        return [_levels_in_panels(ScaleLevels(*pair)) for pair in pairs]
    numbers, dtype = tables[: 1 + kind.has_minimums], torch.float32
    if kind.group:
        dtype = next((d for d in SMALL_SCALES if all(_is_exact(n, d) for n in numbers)), dtype)
    return [in_panels(table).to(dtype) for table in numbers]


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


def _write_words(source: QuantisedTensor, words: torch.Tensor) -> None:
    """words: int32 [panels, steps, words of a step, 64], from the first of these columns on."""
    bits, integers = source.bits, source.integers.contiguous()
    columns, depth = integers.shape
    from_zero = _is_from_zero(bits, source.group, source.byte_inputs)
    if not _kernels.write_words(
        integers.data_ptr(), columns, depth, bits, from_zero, words.data_ptr()
    ):
        raise ValueError(f"a weight of {bits} bits has {integers.min()} to {integers.max()} in it")


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
