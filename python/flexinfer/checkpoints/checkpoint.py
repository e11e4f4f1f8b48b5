"""Checkpoint: weights that are read one by one, some of them quantised, under the model's names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from flexinfer.layers.quantised import QuantisedTensor, QuantisedWeight

EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")
Decode = Callable[[torch.Tensor], QuantisedTensor]
"""uint8 [rows, bytes], as they are stored -> what they are."""


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One weight of a file, not read yet."""

    shape: tuple[int, ...]
    """As the model has it."""
    is_quantised: bool


class Checkpoint(ABC):
    """What a file or folder has. Nothing is kept of what was read."""

    method: str
    """Who quantised it, for messages: "gguf", "gptq", ..."""
    weights: Mapping[str, StoredWeight]
    """Under the names of the model's parameters. Those of the file that it cannot be read without
    (scales, zero points) are part of their weight. Experts have one each, as `expert_weight`
    names them, where the model has one parameter for all."""

    @property
    def is_quantised(self) -> bool:
        return any(weight.is_quantised for weight in self.weights.values())

    @property
    def growing_bytes(self) -> int:
        """Of the weights, in the file, that are read as numbers of more bits: there are no products
        with what is there."""
        return 0

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """A weight that is not quantised, in the file's dtype, in memory of its own."""

    def read_entry(self, name: str, index: int) -> torch.Tensor:
        """As `read`, one entry of its first dimension: without the others, where the files can."""
        return self.read(name)[index].clone()

    @abstractmethod
    def read_quantised(self, name: str) -> QuantisedWeight:
        """A matrix [outputs, inputs] that is."""

    def read_rows(self, name: str) -> tuple[torch.Tensor, Decode]:
        """A quantised embedding: its rows as they are stored, uint8 [rows, bytes], and what some of
        them are. Raises ValueError where the format has none."""
        raise ValueError(f"{name}: an embedding that {self.method} has quantised cannot be read")

    def adjust(self, model: torch.nn.Module) -> None:
        """Set what is no parameter of the model, and the checkpoint says."""
        return


def expert_weight(path: str, expert: int, part: str) -> str:
    """What the weight of an expert of the module at `path` is called; part: of EXPERT_PARTS."""
    return f"{path}.{expert}.{part}.weight"
