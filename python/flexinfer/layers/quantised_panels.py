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
from flexinfer.layers.quantised import QuantisedTensor
from flexinfer.layers.scale_levels import ScaleLevels
from flexinfer.runtime.kernels import SCALE_BLOCK, SCALE_FORMATS

PANEL_COLUMNS = 64
PANELS_AT_ONCE = 32
STEP_INPUTS = {8: 4, 6: 16, 4: 8}
"""By bits: the fewest inputs whose integers fill whole words."""


class Kind(NamedTuple):
    """What the words of a weight stand for."""

    bits: int
    group: int
    byte_inputs: bool
    depth: int
    num_levels: int
    """Tables of scales and minimums that are in two levels: all of them, or none."""


def kind_of(source: QuantisedTensor) -> Kind:
    depth = source.integers.shape[1]
    return Kind(source.bits, source.group, source.byte_inputs, depth, len(source.levels))


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
            # In blocks, as torch makes integers of 32 bits of all that it adds.
            blocks = torch.split(source.integers, PANELS_AT_ONCE * PANEL_COLUMNS)
            sums = torch.cat([some.sum(dim=1, dtype=torch.int32) for some in blocks])
            self.sums = in_panels(128 * sums[:, None])

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
        bits, group, byte_inputs, depth, num_levels = self._kind
        words = torch.unflatten(self.words.view(torch.uint8), 3, (PANEL_COLUMNS, 4))
        steps = _unpack(words[panel, :, :, column], bits, _is_shifted(bits, group, byte_inputs))
        integers = steps.reshape(len(outputs), depth)
        if num_levels:
            tables = [n for n in (self.scales, self.minimums) if n is not None]
            levels = [_levels_at(n, panel, column, depth, group) for n in tables]
            source = QuantisedTensor.in_levels(integers, bits, group, *levels)
            return replace(source, byte_inputs=byte_inputs)
        scales = self.scales[panel, :, column].float()
        minimums = None if self.minimums is None else self.minimums[panel, :, column].float()
        return QuantisedTensor(integers, scales, minimums, bits, group, byte_inputs)


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
    )


def _scales_of(source: QuantisedTensor) -> list[torch.Tensor]:
    """Scales and, if there are any, minimums, in the smallest format that holds them."""
    if source.levels:
        return [_levels_in_panels(level) for level in source.levels]
    numbers = [n for n in (source.scales, source.minimums) if n is not None]
    is_half = source.group > 0 and all(torch.equal(n.half().float(), n) for n in numbers)
    return [in_panels(n.half() if is_half else n) for n in numbers]


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
    inputs, integers = STEP_INPUTS[source.bits], source.integers
    columns, depth = integers.shape
    if depth % inputs or (source.group and source.group % inputs):
        raise ValueError(
            f"a weight of {source.bits} bits needs inputs and groups that are multiples of "
            f"{inputs}, got {depth} and {source.group}"
        )
    if source.bits == 6 and not -32 <= integers.min() <= integers.max() < 32:
        raise ValueError(f"a weight of 6 bits has {integers.min()} to {integers.max()} in it")
    num_words = inputs * source.bits // 32
    words = torch.empty(
        -(-columns // PANEL_COLUMNS), depth // inputs, num_words, PANEL_COLUMNS, dtype=torch.int32
    )
    is_shifted = _is_shifted(source.bits, source.group, source.byte_inputs)
    # A head has outputs by the hundred thousand, and each of these steps makes a copy.
    for some, panels in zip(
        torch.split(integers, PANELS_AT_ONCE * PANEL_COLUMNS),
        torch.split(words, PANELS_AT_ONCE),
        strict=True,
    ):
        padded = torch.nn.functional.pad(some, (0, 0, 0, -len(some) % PANEL_COLUMNS))
        steps = _pack(padded.view(-1, depth // inputs, inputs), source.bits, is_shifted)
        own = steps.contiguous().view(torch.int32).squeeze(-1)
        own = torch.unflatten(own, 0, (-1, PANEL_COLUMNS))
        panels.copy_(own.permute(0, 2, 3, 1))
    return words


def _is_shifted(bits: int, group: int, byte_inputs: bool) -> bool:
    """Whether words hold integers from 0 on."""
    return bits < 8 or (group > 0 and byte_inputs)


def _pack(steps: torch.Tensor, bits: int, is_shifted: bool) -> torch.Tensor:
    """uint8 [columns, steps, words, 4] of int8 [columns, steps, inputs]."""
    if is_shifted:
        steps = steps + (1 << bits - 1)
    steps = steps.view(torch.uint8)
    if bits == 8:
        return steps.unsqueeze(2)
    # Of each eight inputs 0, 4, 1, 5 and 2, 6, 3, 7. The last four fill the bits above the others.
    eights = steps.view(*steps.shape[:2], -1, 2, 4).transpose(3, 4)
    fours = eights.reshape(*steps.shape[:2], -1, 4)
    first, rest = fours[:, :, :-1], fours[:, :, -1:]
    pieces = [rest >> i * (8 - bits) << bits for i in range(first.shape[2])]
    return first | torch.cat(pieces, dim=2)


def _unpack(words: torch.Tensor, bits: int, is_shifted: bool) -> torch.Tensor:
    """int8 [...] of what `_pack` gives: the numbers of each column one after the other."""
    if bits < 8:
        first, above = words & (1 << bits) - 1, words >> bits
        pieces = [above[:, :, i] << i * (8 - bits) for i in range(words.shape[2])]
        rest = reduce(torch.bitwise_or, pieces).unsqueeze(2)
        fours = torch.cat([first, rest], dim=2)
        words = torch.unflatten(fours.flatten(2), 2, (-1, 4, 2)).transpose(3, 4)
    integers = words.view(torch.int8)
    return integers - (1 << bits - 1) if is_shifted else integers


def in_panels(numbers: torch.Tensor) -> torch.Tensor:
    """[panels, groups, 64] of [columns, groups]; zeros fill the last panel."""
    columns, groups = numbers.shape
    numbers = torch.nn.functional.pad(numbers, (0, 0, 0, -columns % PANEL_COLUMNS))
    return numbers.view(-1, PANEL_COLUMNS, groups).transpose(1, 2).contiguous()
