"""TensorFiles: the tensors of a folder's safetensors files, read one by one.

Read, not mapped, as safetensors does: a mapped file's pages stay in the process, and each page that
is let go of comes back with its neighbours.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from flexinfer.errors import UnsupportedModelError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
LFS_POINTER = b"version https://git-lfs"
"""How the small text begins that git leaves in place of a file where git-LFS is not set up."""
DTYPES = {
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
NAMES = {
    "mixtral": (
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"\.experts\.(\d+)\.w1\.", r".experts.\1.gate_proj."),
        (r"\.experts\.(\d+)\.w2\.", r".experts.\1.down_proj."),
        (r"\.experts\.(\d+)\.w3\.", r".experts.\1.up_proj."),
    ),
    "nemotron_h": ((r"^backbone\.", "model."),),
}
"""Model type -> what its files call otherwise than transformers does, as patterns."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Where one lies."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class TensorFiles:
    """Of a local folder or hub id, under the model's names."""

    def __init__(self, model: str, model_type: str = "") -> None:
        """Raises UnsupportedModelError where there are none, or damaged ones; reads their
        headers."""
        self._tensors: dict[str, _Tensor] = {}
        for name in _file_names(model):
            path = _find(model, name)
            if path is None:
                raise UnsupportedModelError(f"model {model!r} lacks the file {name!r}")
            self._tensors |= {_model_name(n, model_type): t for n, t in _header(path).items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> str:
        """As safetensors names it: "I32", "F16", ..."""
        return self._tensors[name].dtype

    def read(self, name: str, index: int | None = None) -> torch.Tensor:
        """In memory of its own. index: of one entry of its first dimension, which alone is read.
        Raises UnsupportedModelError for a dtype that is not known."""
        tensor = self._tensors[name]
        dtype = DTYPES.get(tensor.dtype)
        if dtype is None:
            raise UnsupportedModelError(
                f"{name} is of dtype {tensor.dtype}, which cannot be read here; known are "
                f"{', '.join(DTYPES)}"
            )
        shape = tensor.shape if index is None else tensor.shape[1:]
        num_bytes = prod(shape) * dtype.itemsize
        offset = tensor.offset + (0 if index is None else index * num_bytes)
        found = np.fromfile(tensor.path, np.uint8, num_bytes, offset=offset)
        return torch.from_numpy(found).view(dtype).view(shape)


def check_files(model: str) -> None:
    """Raises UnsupportedModelError, with its name, for a file or an index that is damaged; those
    that are not there are for others to miss."""
    for name in _file_names(model):
        path = _find(model, name)
        if path is not None:
            _header(path)


def _header(path: str) -> dict[str, _Tensor]:
    """Of a file: the length of the header in 8 bytes, the header as JSON, the tensors."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt"):  # sees to it that all is as it should be
            pass
    except SafetensorError as error:
        raise UnsupportedModelError(_what_is_wrong(path, error)) from error
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {
        name: _Tensor(path, t["dtype"], tuple(t["shape"]), 8 + length + t["data_offsets"][0])
        for name, t in header.items()
    }


def is_lfs_pointer(path: str | os.PathLike[str]) -> bool:
    """Raises OSError for what cannot be read."""
    with open(path, "rb") as file:
        return file.read(len(LFS_POINTER)) == LFS_POINTER


def _what_is_wrong(path: str, error: Exception) -> str:
    if is_lfs_pointer(path):
        return f"{path!r} is a git-LFS pointer, not the weights: fetch them by `git lfs pull`"
    return (
        f"{path!r} is no whole safetensors file: it is cut off, still being downloaded, or damaged "
        f"({error})"
    )


def _model_name(name: str, model_type: str) -> str:
    for pattern, replacement in NAMES.get(model_type, ()):
        name = re.sub(pattern, replacement, name)
    return name


def _file_names(model: str) -> list[str]:
    index = _find(model, INDEX)
    if index is None:
        return [SINGLE]
    try:
        with open(index, encoding="utf-8") as file:
            names = set(json.load(file)["weight_map"].values())
        return sorted(map(os.fspath, names))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UnsupportedModelError(
            f"{index!r} is damaged: it should have a weight_map, of each tensor's file ({error!r})"
        ) from error


def _find(model: str, name: str) -> str | None:
    from transformers.utils.hub import cached_file

    path: str | None = cached_file(model, name, _raise_exceptions_for_missing_entries=False)
    return path
