"""GgufValues: what a GGUF file says of its architecture, each value checked as it is read."""

from __future__ import annotations

import struct
from collections.abc import Collection
from math import inf
from typing import Any, NoReturn

from flexinfer.checkpoints.gguf.header import GgufHeader
from flexinfer.errors import UnsupportedModelError

NEXT_LAYERS = "nextn_predict_layers"
"""Key of how many layers behind the model's there are, which predict tokens beyond the next. They
are passed over, as llama.cpp does where nobody asks for such a draft."""


class GgufValues:
    """Each is asked for by its key without the name of the architecture."""

    def __init__(self, header: GgufHeader) -> None:
        self._header, self._prefix = header, header.architecture + "."

    def get(self, key: str, default: Any = None) -> Any:
        """Raises UnsupportedModelError for values that are not those of each layer."""
        value = self._header.metadata.get(self._prefix + key, default)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        if isinstance(value, list):
            raise UnsupportedModelError(
                f"{self._header.path!r} has one for each layer of {self._prefix}{key}"
            )
        return value

    def of_layers(self, key: str) -> list[Any] | None:
        """Where there is one for each layer."""
        value = self._header.metadata.get(self._prefix + key)
        return value if isinstance(value, list) else None

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Of a tensor of the file; None: there is no such tensor."""
        found = self._header.tensors.get(name)
        return None if found is None else found.shape

    def of_each_layer(self, key: str) -> list[float]:
        """Of a key without the name of an architecture; a number alone is that of all layers."""
        count, value = self.count("block_count"), self._header.metadata.get(key)
        numbers: list[Any] = value if isinstance(value, list) else [value] * count
        if len(numbers) != count or not all(type(n) is float for n in numbers):
            raise UnsupportedModelError(
                f"{self._header.path!r} has {key} = {value!r}; known: a number for each of {count} "
                "layers"
            )
        return numbers

    def tensor(self, name: str) -> list[float] | None:
        """The numbers of a small tensor of float32 that belongs to the config; None: there is no
        such tensor."""
        found = self._header.tensors.get(name)
        if found is None:
            return None
        if found.type != "F32" or len(found.shape) != 1:
            raise UnsupportedModelError(
                f"{self._header.path!r} has {name!r} as {found.type} {list(found.shape)}; known "
                "are vectors of F32"
            )
        with open(found.path, "rb") as file:
            file.seek(found.offset)
            return list(struct.unpack(f"<{found.shape[0]}f", file.read(found.size_bytes)))

    def has_tensor(self, name: str) -> bool:
        return name in self._header.tensors

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise UnsupportedModelError(f"{self._header.path!r} has no {self._prefix}{key}")
        return value

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        """default: None where there has to be one. Raises UnsupportedModelError for what counts
        nothing, or less than `least`."""
        value = self.need(key) if default is None else self.get(key, default)
        if type(value) is not int or value < least:
            self.refuse(key, f"whole numbers from {least} on")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "true and false")
        return value

    def num_layers(self) -> int:
        """Of the model: without NEXT_LAYERS."""
        count, others = self.count("block_count"), self.get(NEXT_LAYERS, 0)
        if type(others) is not int or not 0 <= others < count:
            self.refuse(NEXT_LAYERS, f"whole numbers from 0 on, less than the block_count, {count}")
        return count - others

    def factor(self, key: str, default: float | None = None) -> float:
        """As `count`, of numbers that something is multiplied with or divided by."""
        value = self.need(key) if default is None else self.get(key, default)
        if type(value) not in (int, float) or not 0 < value < inf:
            self.refuse(key, "numbers above 0")
        return float(value)

    def equal(self, key: str, wanted: int, of: str, default: int | None = None) -> None:
        """Raises UnsupportedModelError where it is not what `of` are."""
        if self.count(key, default) != wanted:
            self.refuse(key, f"only {of}, {wanted}")

    def mlp_width(self, key: str) -> int:
        """The feed_forward_length, which the value of this key has to be, too, if there is one."""
        width = self.count("feed_forward_length")
        self.equal(key, width, "the feed_forward_length", default=width)
        return width

    def refuse(self, key: str, known: str) -> NoReturn:
        value = self._header.metadata.get(self._prefix + key)
        raise UnsupportedModelError(
            f"{self._header.path!r} has {self._prefix}{key} = {value!r}; known: {known}"
        )

    def refuse_unknown(self, known: Collection[str]) -> None:
        keys = [k for k in self._header.metadata if k.startswith(self._prefix)]
        unknown = sorted(set(keys) - {self._prefix + key for key in known})
        if unknown:
            raise UnsupportedModelError(
                f"{self._header.path!r} has {', '.join(unknown)}, which may change what the model "
                "computes and is not known here"
            )
