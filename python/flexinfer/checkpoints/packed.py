"""PackedCheckpoint: folders whose linear layers have integers, scales and zero points as tensors.

Three programs write three layouts of the same thing, a weight (q - zero) * scale with a scale for
each group of inputs; `gptq.py`, `awq.py` and `compressed.py` say what is where. Here they become
scale * (q - middle) + scale * (middle - zero), the second part the group's minimum.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

from flexinfer.checkpoints.parts import PartsCheckpoint
from flexinfer.errors import UnsupportedModelError
from flexinfer.layers.quantised import QuantisedTensor


class PackedCheckpoint(PartsCheckpoint):
    def read_quantised(self, name: str) -> QuantisedTensor:
        path = name.rpartition(".")[0]
        try:
            return self._read_layer(path)
        except ValueError as error:
            raise UnsupportedModelError(f"{path} cannot be read: {error}") from error

    @abstractmethod
    def _read_layer(self, path: str) -> QuantisedTensor:
        """Raises ValueError for parts that do not go together."""


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [..., n, 32 / bits] of int32 [..., n]: each word's numbers, the lowest bits first."""
    # Flat first: of one row or column, what is contiguous may have strides that no view takes.
    found = words.reshape(-1).view(torch.uint8).view(*words.shape, 4)
    if bits == 8:
        return found
    return torch.stack([found & 15, found >> 4], dim=-1).flatten(-2)


def with_zeros(
    numbers: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, bits: int
) -> QuantisedTensor:
    """Of (numbers - zeros) * scales. numbers: uint8 [outputs, inputs]; zeros: integers, and scales
    [outputs, groups]. Raises ValueError for other shapes."""
    check_groups(numbers, scales, zeros)
    middle = 1 << (bits - 1)
    offsets = middle - zeros.int()
    scales = scales.float().contiguous()
    integers = (numbers ^ middle if bits == 8 else numbers - middle).view(torch.int8)
    minimums = scales * offsets if bool(offsets.any()) else None
    group = numbers.shape[1] // scales.shape[1]
    return QuantisedTensor(integers.contiguous(), scales, minimums, bits, group)


def check_groups(numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> None:
    """Raises ValueError for shapes that do not go together: some torch would stretch."""
    (outputs, inputs), (rows, groups) = numbers.shape, scales.shape
    if rows != outputs or not groups or inputs % groups or zeros.shape != scales.shape:
        raise ValueError(
            f"scales {list(scales.shape)} and zero points {list(zeros.shape)} do not go with a "
            f"weight {list(numbers.shape)}"
        )


def check_group_size(path: str, size: Any, inputs: int, groups: int) -> None:
    """Raises UnsupportedModelError where a layer has other groups than the settings' `group_size`,
    -1: one group; None: unsaid. What is left over may be a group of its own in the file."""
    if size is None:
        if inputs % groups:
            raise UnsupportedModelError(
                f"{path} cannot be read: {groups} groups do not go with its {inputs} inputs"
            )
        return
    if not isinstance(size, int) or (size < 1 and size != -1):
        raise UnsupportedModelError(f"group_size = {size!r} cannot be read here")
    if size > 0 and inputs % size:
        raise UnsupportedModelError(
            f"{path} cannot be read: its {inputs} inputs are no whole number of groups of {size} "
            f"(group_size): the last one has {inputs % size}"
        )
    if groups != (inputs // size if size > 0 else 1):
        raise UnsupportedModelError(
            f"{path} cannot be read: scales of {groups} groups do not go with its {inputs} inputs "
            f"and group_size {size}"
        )
