"""PartsCheckpoint: folders whose quantised linear layers are several tensors each."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flexinfer.checkpoints.checkpoint import StoredWeight
from flexinfer.checkpoints.plain import PlainCheckpoint
from flexinfer.checkpoints.tensor_files import TensorFiles
from flexinfer.errors import UnsupportedModelError

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


MODULES = ("modules_to_not_convert", "ignored_layers")
"""Settings that name layers of which the weights are not quantised."""
INTEGERS = ("I8", "I32", "I64")
WORDS = Part(("I32",))
SCALES = Part(("F16", "BF16", "F32", "F64"))


class PartsCheckpoint(PlainCheckpoint):
    stays_quantised = True
    """Whether layers keep the integers that the folder has; else they are read as numbers."""

    def __init__(self, files: TensorFiles, mark: str, parts: Mapping[str, Part]) -> None:
        """parts: the tensors of a quantised layer; mark: which of them no other layer has.

        Raises UnsupportedModelError for layers that cannot be read; reads no weight."""
        super().__init__(files)
        self._mark, self._parts = mark, parts
        paths = [n.rpartition(".")[0] for n in files if n.rpartition(".")[2] == mark]
        self._layers = {path for path in paths if self._is_layer(path)}
        for name in files:
            if self._is_part(name) or name.endswith(POSITIONS):
                del self.weights[name]
        for path in sorted(self._layers):
            if f"{path}.weight" in self.weights:
                raise UnsupportedModelError(
                    f"{path} has a weight beside its {mark}: which of them is meant is not known"
                )
            self._check_parts(path)
            self._check_layer(path)
            self.weights[f"{path}.weight"] = StoredWeight(self._shape(path), self.stays_quantised)

    def _is_layer(self, path: str) -> bool:
        return True

    def _is_part(self, name: str) -> bool:
        path, _, ending = name.rpartition(".")
        return path in self._layers and ending in self._parts

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


def refuse_other(settings: Settings, method: str, name: str, known: tuple[Any, ...]) -> Any:
    """The setting, if it is one of those that are known; the first one is the default."""
    value = settings.get(name, known[0])
    if not any(value == other and type(value) is type(other) for other in known):
        raise UnsupportedModelError(
            f"weights quantised by {method!r} with {name} = {value!r} cannot be read here; known: "
            f"{', '.join(map(repr, known))}"
        )
    return value


def refuse_unknown(settings: Settings, method: str, known: set[str]) -> None:
    """Raises UnsupportedModelError for settings of other names, and for lists of modules that are
    none: which modules are not converted is read off their tensors."""
    unknown = sorted(settings.keys() - known)
    if unknown:
        raise UnsupportedModelError(
            f"weights quantised by {method!r} with {', '.join(unknown)} cannot be read here: it is "
            "not known what that changes"
        )
    for name in MODULES:
        modules = settings.get(name)
        if modules is not None and not isinstance(modules, list):
            raise UnsupportedModelError(
                f"weights quantised by {method!r} with {name} = {modules!r} cannot be read here: "
                "it has to be a list"
            )
