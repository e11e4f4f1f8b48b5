"""QuantisedTensor: a weight of small integers with their scales, and how one is made of a weight.

int8                W8A8: a scale per output; inputs become integers too, a scale per token
int4-g32            W4A16: a scale per output and 32 inputs; inputs stay as they are
int4-g32-zp         a minimum beside each scale: zero points, wherever zero lies in the group
int4-g32-a8         W4A8: inputs become integers of 8 bits, a scale per token

Inputs with one scale per token are rotated before (`rotation.py`), and weights made for it.

A checkpoint that is quantised already says itself what its weights are; their inputs stay as they
are, or become integers by the name "a8" (`with_byte_inputs`), a scale per token and group.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from flexinfer.layers.codebook import Codebook
from flexinfer.layers.scale_levels import ScaleLevels
from flexinfer.runtime.kernels import SCALE_BLOCK
from flexinfer.runtime.pieces import of_pieces
from flexinfer.runtime.rotation import rotate, rotate_back, slow_rotate_inputs

GROUP_SIZES = (32, 64, 128)
BYTE_INPUTS = "a8"
"""Of weights that are quantised already: they stay so, inputs become integers of 8 bits."""
SCALE_CANDIDATES = (1.0, 0.94, 0.88, 0.82, 0.76)
"""Of a group's largest possible scale: a smaller one clips the largest weight and rounds the others
less. The one with the least squared error is taken."""


class TensorKind(NamedTuple):
    """Weights of one kind can be joined."""

    bits: int
    group: int
    has_minimums: bool
    byte_inputs: bool
    depth: int
    num_levels: int
    """Tables of scales and minimums that are in two levels: all of them, or none."""
    codebook: Codebook | None
    is_rotated: bool

    @property
    def has_plain_levels(self) -> bool:
        """Whether these say all of a scale."""
        return self.num_levels > 0 and (self.codebook is None or self.codebook.factor_unit == 1)


class QuantisedWeight(ABC):
    """A weight of integers and scales: all of it (QuantisedTensor), or made some outputs at a time
    (QuantisedRows)."""

    __slots__ = ()

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(columns, depth)"""

    @property
    @abstractmethod
    def kind(self) -> TensorKind: ...

    @abstractmethod
    def __getitem__(self, outputs: slice) -> QuantisedTensor:
        """Some of the outputs."""

    @abstractmethod
    def with_byte_inputs(self, in_groups: bool = False) -> QuantisedWeight:
        """The same weight for inputs of 8 bits. in_groups: even where one of 8 bits has a scale for
        each output, which without is as int8 has it."""

    def dequantised_to(self, dtype: torch.dtype) -> torch.Tensor:
        """[columns, depth] in this dtype."""
        output = torch.empty(self.shape, dtype=dtype)

        def write(some: slice) -> None:
            output[some] = self[some].dequantised()

        of_pieces(write, len(output), 4 * output.shape[1])
        return output


@dataclass(frozen=True, slots=True)
class Scheme:
    """What weights are quantised to at load."""

    bits: int
    group: int
    """Inputs that share a scale; 0: all of an output."""
    has_minimums: bool = False
    byte_inputs: bool = False
    """Whether inputs are quantised as well. REQUIRES: true with group 0."""

    @classmethod
    def parse(cls, name: str) -> Scheme:
        """Of a name such as "int4-g64-zp". Raises ValueError, saying what there is."""
        if name == "int8":
            return cls(8, 0, byte_inputs=True)
        found = re.fullmatch(r"int4(?:-g(\d+))?(-zp)?(-a8)?", name)
        group = 0 if found is None else int(found[1] or GROUP_SIZES[0])
        if found is None or group not in GROUP_SIZES:
            raise ValueError(
                f"quantization must be auto, int8, or int4, the latter with a group size of "
                f"{', '.join(map(str, GROUP_SIZES))}, zero points and inputs of 8 bits if wanted "
                f"(int4-g64-zp-a8), or {BYTE_INPUTS} for weights that are quantised already, got "
                f"{name!r}"
            )
        return cls(4, group, found[2] is not None, found[3] is not None)

    def fits(self, depth: int) -> bool:
        """Whether a weight of so many inputs can be quantised in this way."""
        return depth > 0 and depth % (self.group or 4) == 0

    def quantise(self, weight: torch.Tensor) -> QuantisedTensor:
        """weight: [columns, depth], float. REQUIRES `fits`. Raises ValueError for numbers that are
        not finite, or beyond what float16 scales reach."""
        rows, depth = weight.shape
        parts = of_pieces(lambda some: self._quantise(weight[some]), rows, 4 * depth)
        return QuantisedTensor.join(parts)

    def _quantise(self, weight: torch.Tensor) -> QuantisedTensor:
        numbers = rotate(weight) if self.byte_inputs else weight
        if self.group == 0:
            source = quantise_outputs(numbers)
        else:
            source = quantise_groups(numbers, self.group, self.has_minimums)
        if not source.is_finite:
            least, most = (end.item() for end in torch.aminmax(weight))
            raise ValueError(
                f"a weight with numbers from {least:g} to {most:g} cannot be quantised to "
                f"{self.bits} bits: the checkpoint may be damaged"
            )
        return replace(source, byte_inputs=self.byte_inputs, is_rotated=self.byte_inputs)


@dataclass(frozen=True, slots=True)
class QuantisedTensor(QuantisedWeight):
    """A weight [columns, depth] = integers * scale + minimum of each one's group, or with a
    codebook: the numbers that it has for them."""

    integers: torch.Tensor
    """int8 [columns, depth]; of 6 bits -32 to 31, of 4 bits -8 to 7."""
    scales: torch.Tensor
    """float32 [columns, groups]"""
    minimums: torch.Tensor | None
    """float32 [columns, groups]"""
    bits: int
    group: int
    """So many inputs share a scale; 0: all of an output."""
    byte_inputs: bool = False
    """Whether the inputs of a product become integers too, by `quantise_inputs`; with group 0 they
    do."""
    levels: tuple[ScaleLevels, ...] = ()
    """The same scales and minimums in fewer bytes, which kernels then read: see `in_levels`."""
    codebook: Codebook | None = None
    """Of 4 bits in groups without minimums: what integers stand for, if not for themselves."""
    is_rotated: bool = False
    """Whether the inputs of a product are rotated (`rotation.py`), then rounded with one scale a
    token. With byte_inputs alone."""

    @classmethod
    def in_levels(
        cls,
        integers: torch.Tensor,
        bits: int,
        group: int,
        *levels: ScaleLevels,
        codebook: Codebook | None = None,
    ) -> QuantisedTensor:
        """levels: of scales and, if wanted, of offsets: the weight is (integers + 8) * scale -
        offset, 8 being half of what so many bits can be. Raises ValueError for sizes that do not go
        together."""
        columns, depth = integers.shape
        for level in levels:
            level.check(columns, depth, group)
        scales, minimums = levels[0].products(), None
        if codebook is not None:
            scales = scales * codebook.factor_unit
        if len(levels) > 1:
            minimums = (1 << bits - 1) * scales - levels[1].products()
        return cls(integers, scales, minimums, bits, group, levels=levels, codebook=codebook)

    @property
    def numbers(self) -> list[torch.Tensor]:
        """Scales and, if there are any, minimums."""
        return [self.scales] if self.minimums is None else [self.scales, self.minimums]

    @property
    def is_finite(self) -> bool:
        """Whether these all are."""
        return all(bool(numbers.isfinite().all()) for numbers in self.numbers)

    @property
    def shape(self) -> tuple[int, int]:
        columns, depth = self.integers.shape
        return columns, depth

    @property
    def kind(self) -> TensorKind:
        form = self.bits, self.group, self.minimums is not None, self.byte_inputs
        return TensorKind(*form, self.shape[1], len(self.levels), self.codebook, self.is_rotated)

    @classmethod
    def join(cls, tensors: Sequence[QuantisedTensor]) -> QuantisedTensor:
        """One after the other, as one layer's outputs. Raises ValueError for unlike ones."""
        first = tensors[0]
        if len(tensors) == 1:
            return first
        if any(t.kind != first.kind for t in tensors):
            kinds = sorted({str(t.kind) for t in tensors})
            raise ValueError(f"weights of different kinds cannot be joined: {kinds}")
        minimums = None
        if first.minimums is not None:
            minimums = torch.cat([t.minimums for t in tensors if t.minimums is not None])
        return cls(
            torch.cat([t.integers for t in tensors]),
            torch.cat([t.scales for t in tensors]),
            minimums,
            first.bits,
            first.group,
            first.byte_inputs,
            tuple(map(ScaleLevels.join, zip(*(t.levels for t in tensors), strict=True))),
            first.codebook,
            first.is_rotated,
        )

    def with_byte_inputs(self, in_groups: bool = False) -> QuantisedTensor:
        is_by_output = self.scales.shape[1] == 1 and self.minimums is None
        if self.bits == 8 and is_by_output and not in_groups:
            return replace(self, group=0, byte_inputs=True, levels=())
        return replace(self, byte_inputs=True)

    def with_inputs_in_order(self, order: torch.Tensor) -> QuantisedTensor:
        """order: int64 [depth], for each input which of this weight's it is. Scales in two levels
        stay so where whole blocks of them move. Raises ValueError where groups would be torn."""
        group = self.group or self.shape[1]
        groups = _moved_whole(order, group)
        if groups is None:
            raise ValueError(
                f"inputs that share a scale with {group - 1} others cannot lie in another order"
            )
        blocks = _moved_whole(order, SCALE_BLOCK) if self.levels else None
        levels = () if blocks is None else [n.of_inputs(groups, blocks) for n in self.levels]
        return replace(
            self,
            integers=self.integers[:, order],
            scales=self.scales[:, groups],
            minimums=None if self.minimums is None else self.minimums[:, groups],
            levels=tuple(levels),
        )

    def dequantised(self) -> torch.Tensor:
        """float32 [columns, depth]: what inputs as they are would be multiplied with."""
        factors = self.factors()
        return rotate_back(factors) if self.is_rotated else factors

    def factors(self) -> torch.Tensor:
        """float32 [columns, depth]: what inputs are multiplied with, once they are rotated if they
        are. The reference of all that is computed with it."""
        integers = self.integers if self.codebook is None else self.codebook.look_up(self.integers)
        weight = torch.unflatten(integers.float(), 1, (self.scales.shape[1], -1))
        weight = weight * self.scales[:, :, None]
        if self.minimums is not None:
            weight = weight + self.minimums[:, :, None]
        return weight.flatten(1)

    def as_one_of(self, kinds: Sequence[TensorKind]) -> QuantisedTensor:
        """The same numbers in a form that weights of all these kinds have, its own among them."""
        if len({*kinds}) == 1:
            return self
        if self.codebook is not None:
            integers = self.codebook.look_up(self.integers)
            return replace(self, integers=integers, bits=8, codebook=None).as_one_of(kinds)
        bits = max(8 if kind.codebook is not None else kind.bits for kind in kinds)
        group = min(kind.group for kind in kinds)
        times = self.group // group
        has_minimums = any(kind.has_minimums for kind in kinds)
        if all(kind.has_plain_levels for kind in kinds):
            integers, middle = self.integers, 1 << bits - 1
            levels = [level.repeated(times) for level in self.levels]
            if len(levels) > 1:  # integers are from 0 on there
                integers = integers - (middle - (1 << self.bits - 1))
            elif has_minimums:
                levels.append(levels[0]._replace(factors=levels[0].factors * middle))
            return QuantisedTensor.in_levels(integers, bits, group, *levels)
        scales, *others = (numbers.repeat_interleave(times, dim=1) for numbers in self.numbers)
        if has_minimums and not others:
            others = [torch.zeros_like(scales)]
        minimums = others[0] if others else None
        return QuantisedTensor(self.integers, scales, minimums, bits, group)

    def __getitem__(self, outputs: slice | torch.Tensor) -> QuantisedTensor:
        """Views, of a slice."""
        minimums = None if self.minimums is None else self.minimums[outputs]
        return replace(
            self,
            integers=self.integers[outputs],
            scales=self.scales[outputs],
            minimums=minimums,
            levels=tuple(level.of_outputs(outputs) for level in self.levels),
        )

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., depth] times the weight, in float64: slowly, as a kernel should."""
        if self.byte_inputs:
            x = slow_rotate_inputs(x) if self.is_rotated else x
            num_scales = 1 if self.is_rotated else self.scales.shape[1]
            integers, scales = quantise_inputs(torch.unflatten(x, -1, (num_scales, -1)))
            x = (integers.double() * scales.double()).flatten(-2)
        return x.double() @ self.factors().double().T


def _moved_whole(order: torch.Tensor, width: int) -> torch.Tensor | None:
    """An order of numbers as one of groups of so many; None: it tears some apart."""
    if len(order) % width:
        return None
    groups = order.view(-1, width)
    is_whole = (groups[:, :1] % width == 0).all() and (groups.diff(dim=1) == 1).all()
    return groups[:, 0] // width if is_whole else None


def quantise_inputs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers (float32, -127 to 127) and scales [..., 1] of x [..., depth], as
    cpp/kernels/linear/inputs.h says."""
    largest = x.float().abs().amax(dim=-1, keepdim=True)
    # Of a number and a tensor torch multiplies by the reciprocal, which is rounded before.
    factor = torch.where(largest > 0, torch.full_like(largest, 127) / largest, 0.0)
    return (x.float() * factor).round(), largest / 127


def quantise_outputs(weight: torch.Tensor) -> QuantisedTensor:
    """8 bits, a scale per output: symmetric, the largest weight becomes 127."""
    weight = weight.float()
    scales = weight.abs().amax(dim=1, keepdim=True) / 127
    integers = (weight / scales.clamp_min(torch.finfo(torch.float32).tiny)).round_()
    return QuantisedTensor(integers.clamp_(-127, 127).to(torch.int8), scales, None, 8, 0, True)


def quantise_groups(weight: torch.Tensor, group: int, has_minimums: bool) -> QuantisedTensor:
    """4 bits; scales and minimums are numbers of float16, so that they take as little."""
    columns, depth = weight.shape
    groups = weight.float().view(columns, depth // group, group)
    if has_minimums:
        low, high = groups.amin(dim=2).clamp_max(0), groups.amax(dim=2).clamp_min(0)
        scales = _halves((high - low) / 15)
        minimums = _halves(low + 8 * scales)
        shifted = groups - minimums[:, :, None]
        integers = _rounded(shifted, scales, shifted).to(torch.int8)
        return QuantisedTensor(integers.view(columns, depth), scales, minimums, 4, group)
    # The largest magnitude becomes -8, whichever sign it has.
    low, high = groups.amin(dim=2), groups.amax(dim=2)
    largest = torch.where(high > -low, high, low) / -8
    best = torch.full_like(largest, torch.inf)
    scales = torch.full_like(largest, torch.nan)  # stays so where no candidate has an error
    buffer = torch.empty_like(groups)
    for candidate in SCALE_CANDIDATES:
        tried = _halves(largest * candidate)
        wrong = _rounded(groups, tried, buffer).mul_(tried[:, :, None]).sub_(groups)
        errors = torch.linalg.vector_norm(wrong, dim=2)
        scales = torch.where(errors < best, tried, scales)
        best = torch.minimum(best, errors)
    integers = _rounded(groups, scales, buffer).to(torch.int8)
    return QuantisedTensor(integers.view(columns, depth), scales, None, 4, group)


def _rounded(groups: torch.Tensor, scales: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """-8 to 7 of [columns, groups, group], written to `output`; a scale of 0 makes zeros."""
    inverse = torch.where(scales != 0, 1 / scales, 0.0)
    return torch.mul(groups, inverse[:, :, None], out=output).round_().clamp_(-8, 7)


def _halves(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.half().float()
