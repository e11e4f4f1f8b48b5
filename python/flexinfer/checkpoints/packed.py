"""PackedCheckpoint: folders whose linear layers have integers, scales and zero points as tensors.

Three programs write three layouts of the same thing, a weight (q - zero) * scale with a scale for
each group of inputs; `gptq.py`, `awq.py` and `compressed.py` say what is where. Here they become
scale * (q - middle) + scale * (middle - zero), the second part the group's minimum.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flexinfer.checkpoints.checkpoint import Checkpoint, StoredWeight
from flexinfer.checkpoints.tensor_files import TensorFiles
from flexinfer.errors import UnsupportedModelError
from flexinfer.layers.quantised import QuantisedTensor

Settings = Mapping[str, Any]
"""`quantization_config` of a config.json."""
POSITIONS = "rotary_emb.inv_freq"
"""Old checkpoints have what the config says anyway."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one tensor of a layer may be."""

    dtypes: tuple[str, ...]
    """As safetensors names them."""
    dims: tuple[int, ...] = (2,)
    """How many it may have."""
    is_needed: bool = True


INTEGERS = ("I8", "I32", "I64")
WORDS = Part(("I32",))
SCALES = Part(("F16", "BF16", "F32", "F64"))


class PackedCheckpoint(Checkpoint):
    def __init__(self, files: TensorFiles, mark: str, parts: Mapping[str, Part]) -> None:
        """parts: the tensors of a quantised layer; mark: which of them no other layer has.

        Raises UnsupportedModelError for layers that cannot be read; reads no weight."""
        self._files, self._mark, self._parts = files, mark, parts
        paths = [n.rpartition(".")[0] for n in files if n.rpartition(".")[2] == mark]
        layers = {path for path in paths if self._is_layer(path)}
        self.weights = {
            name: StoredWeight(files.shape(name), False)
            for name in files
            if not (self._is_part(name, layers) or name.endswith(POSITIONS))
        }
        for path in sorted(layers):
            if f"{path}.weight" in self.weights:
                raise UnsupportedModelError(
                    f"{path} has a weight beside its {mark}: which of them is meant is not known"
                )
            self._check_parts(path)
            self._check_layer(path)
            self.weights[f"{path}.weight"] = StoredWeight(self._shape(path), True)

    def read(self, name: str) -> torch.Tensor:
        return self._files.read(name)

    def read_entry(self, name: str, index: int) -> torch.Tensor:
        return self._files.read(name, index)

    def read_quantised(self, name: str) -> QuantisedTensor:
        path = name.rpartition(".")[0]
        try:
            return self._read_layer(path)
        except ValueError as error:
            raise UnsupportedModelError(f"{path} cannot be read: {error}") from error

    def _is_layer(self, path: str) -> bool:
        return True

    def _is_part(self, name: str, layers: set[str]) -> bool:
        path, _, ending = name.rpartition(".")
        return path in layers and ending in self._parts

    def _check_parts(self, path: str) -> None:
        """Raises UnsupportedModelError: the bits of other dtypes would be taken for integers."""
        found = {ending for ending in self._parts if f"{path}.{ending}" in self._files}
        missing = sorted(e for e, part in self._parts.items() if part.is_needed and e not in found)
        if missing:
            raise UnsupportedModelError(
                f"{path}.{self._mark} is there, but not its {' and '.join(missing)}"
            )
        for ending in sorted(found):
            part, name = self._parts[ending], f"{path}.{ending}"
            shape, dtype = self._files.shape(name), self._files.dtype(name)
            if dtype not in part.dtypes or len(shape) not in part.dims or 0 in shape:
                raise UnsupportedModelError(
                    f"{name} is {dtype} {list(shape)}, which {self.method!r} does not write; it "
                    f"has to be {' or '.join(part.dtypes)} of {' or '.join(map(str, part.dims))} "
                    "dimensions"
                )

    def _part(self, path: str, ending: str) -> torch.Tensor:
        return self._files.read(f"{path}.{ending}")

    @abstractmethod
    def _shape(self, path: str) -> tuple[int, int]:
        """Outputs and inputs of a layer."""

    @abstractmethod
    def _check_layer(self, path: str) -> None:
        """Raises UnsupportedModelError for what cannot be read."""

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


def refuse_other(settings: Settings, method: str, name: str, known: tuple[Any, ...]) -> Any:
    """The setting, if it is one of those that are known; the first one is the default."""
    value = settings.get(name, known[0])
    if not any(value == other and type(value) is type(other) for other in known):
        raise UnsupportedModelError(
            f"weights quantised by {method!r} with {name} = {value!r} cannot be read here; known: "
            f"{', '.join(map(repr, known))}"
        )
    return value
