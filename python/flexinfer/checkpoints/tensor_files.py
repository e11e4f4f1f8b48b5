"""TensorFiles: the tensors of a folder's safetensors files, read one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch

from flexinfer.errors import UnsupportedModelError
from flexinfer.runtime.weight_files import drop_pages

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class TensorFiles:
    """Of a local folder or hub id. Files stay open, and keep no memory."""

    def __init__(self, model: str) -> None:
        """Raises UnsupportedModelError where there are none; reads their headers."""
        from safetensors import safe_open

        self._handles: dict[str, Any] = {}
        for name in _file_names(model):
            path = _find(model, name)
            if path is None:
                raise UnsupportedModelError(f"model {model!r} lacks the file {name!r}")
            handle: Any = safe_open(path, framework="pt")
            self._handles |= dict.fromkeys(handle.keys(), handle)

    def __iter__(self) -> Iterator[str]:
        return iter(self._handles)

    def __contains__(self, name: str) -> bool:
        return name in self._handles

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handles[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """As safetensors names it: "I32", "F16", ..."""
        dtype: str = self._handles[name].get_slice(name).get_dtype()
        return dtype

    def read(self, name: str) -> torch.Tensor:
        """In memory of its own; of the file no pages stay."""
        tensor: torch.Tensor = self._handles[name].get_tensor(name)
        copy = tensor.clone()
        drop_pages([tensor])
        return copy


def _file_names(model: str) -> list[str]:
    index = _find(model, INDEX)
    if index is None:
        return [SINGLE]
    with open(index, encoding="utf-8") as file:
        return sorted(set(json.load(file)["weight_map"].values()))


def _find(model: str, name: str) -> str | None:
    from transformers.utils.hub import cached_file

    path: str | None = cached_file(model, name, _raise_exceptions_for_missing_entries=False)
    return path
