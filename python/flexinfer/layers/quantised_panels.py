"""QuantisedPanels: a quantised weight in the order in which the kernels read it.

cpp/kernels/calls/quantised.h says how words, scales and minimums stand there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from flexinfer import _kernels
from flexinfer.layers.quantised import QuantisedTensor
from flexinfer.layers.scale_levels import ScaleLevels
from flexinfer.runtime.kernels import SCALE_FORMATS

PANEL_COLUMNS = 64
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
        self.words = words_of(source)
        panels = _scales_of(source)
        self.scales, self.minimums = panels[0], panels[1] if len(panels) > 1 else None
        self.sums = None
        if source.group == 0:
            self.sums = in_panels(128 * source.integers.sum(dim=1, dtype=torch.int32)[:, None])

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
    integers = torch.nn.functional.pad(integers, (0, 0, 0, -columns % PANEL_COLUMNS))
    steps = _pack(integers.view(-1, depth // inputs, inputs), source.bits)
    if source.bits == 8 and source.group and source.byte_inputs:
        steps = steps ^ 128
    num_words = steps.shape[2]
    words = steps.contiguous().view(torch.int32).view(-1, PANEL_COLUMNS, depth // inputs, num_words)
    return words.permute(0, 2, 3, 1).contiguous()


def _pack(steps: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [columns, steps, words, 4] of int8 [columns, steps, inputs]."""
    if bits == 8:
        return steps.view(torch.uint8).unsqueeze(2)
    shifted = (steps + (1 << bits - 1)).view(torch.uint8)
    # Of each eight inputs 0, 4, 1, 5 and 2, 6, 3, 7.
    eights = shifted.view(*steps.shape[:2], -1, 2, 4).transpose(3, 4)
    fours = eights.reshape(*steps.shape[:2], -1, 4)
    first, rest = fours[:, :, :-1], fours[:, :, -1:]
    if bits == 4:
        return torch.bitwise_or(first, rest << 4)
    pieces = [rest << 6 - 2 * i & 192 for i in range(3)]
    return torch.bitwise_or(first, torch.cat(pieces, dim=2))


def in_panels(numbers: torch.Tensor) -> torch.Tensor:
    """[panels, groups, 64] of [columns, groups]; zeros fill the last panel."""
    columns, groups = numbers.shape
    numbers = torch.nn.functional.pad(numbers, (0, 0, 0, -columns % PANEL_COLUMNS))
    return numbers.view(-1, PANEL_COLUMNS, groups).transpose(1, 2).contiguous()
