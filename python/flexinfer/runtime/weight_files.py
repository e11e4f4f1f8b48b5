"""Weight files: letting go of a safetensors file whose weights have been converted or packed.

safetensors maps a file as a whole, and each weight that needs no conversion is a view of it: one
that is left keeps the pages of all in the process's resident set.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

KEPT_SHARE = 0.5
"""A file of which more than this is in use stays mapped: copying its weights would save little."""

CONVERTED_BYTES = 32 << 20
"""Weights whose pages are let go of together: finding the files takes a millisecond."""
NO_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"
"""With it transformers reads and converts weights one by one, in the thread that loads."""


class DropBehind(TorchFunctionMode):
    """While it is entered, a weight of a file that this thread converts to another dtype or device
    leaves no pages behind: else the whole file is held beside the converted model."""

    def __init__(self) -> None:
        super().__init__()
        self._converted: list[torch.Tensor] = []
        self._num_bytes = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.to and result is not args[0]:
            self._converted.append(args[0])
            self._num_bytes += args[0].nbytes
            if self._num_bytes >= CONVERTED_BYTES:
                self._drop()
        return result

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._drop()

    def _drop(self) -> None:
        drop_pages(self._converted)
        self._converted, self._num_bytes = [], 0


@contextmanager
def converting_one_by_one() -> Iterator[None]:
    """Have transformers convert the weights that it loads here in this thread, each read when its
    turn comes and then let go of: the most that is held is the model and a few of its weights."""
    before = os.environ.get(NO_THREADS)
    os.environ[NO_THREADS] = "1"
    try:
        with DropBehind():
            yield
    finally:
        if before is None:
            del os.environ[NO_THREADS]
        else:
            os.environ[NO_THREADS] = before


def drop_pages(weights: Iterable[torch.Tensor]) -> int:
    """Give back the pages of files under weights that are not needed any more; returns bytes.

    A model that is packed weight by weight would else hold its file and its packed weights at the
    end, twice its size. A weight stays readable: its pages are read from the file again. Memory of
    its own, and pages that it shares with a neighbour, stay.
    """
    files = _mapped_files()
    num_bytes = 0
    for weight in weights:
        if _file_of(weight, files) is None:
            continue
        start = -(-weight.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (weight.data_ptr() + weight.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        length = end - start
        if length > 0 and _libc().madvise(start, length, mmap.MADV_DONTNEED) == 0:
            num_bytes += length
    return num_bytes


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def let_go_of_files(model: torch.nn.Module) -> int:
    """Copy the parameters and buffers of files that are mostly unused by now; returns bytes copied.

    Nothing happens where there is no /proc.
    """
    files = _mapped_files()
    tensors: dict[tuple[int, int], list[torch.Tensor]] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        file = _file_of(tensor, files)
        if file is not None:
            tensors.setdefault(file, []).append(tensor)
    num_bytes = 0
    for (start, end), used in tensors.items():
        used_bytes = sum({tensor.data_ptr(): tensor.nbytes for tensor in used}.values())
        if used_bytes <= KEPT_SHARE * (end - start):
            _copy(used)
            num_bytes += used_bytes
    return num_bytes


def _copy(tensors: list[torch.Tensor]) -> None:
    """Give each memory of its own; those that shared theirs go on sharing it."""
    copies: dict[tuple[int, torch.Size, tuple[int, ...]], torch.Tensor] = {}
    for tensor in tensors:
        key = tensor.data_ptr(), tensor.shape, tensor.stride()
        if key not in copies:
            copies[key] = tensor.detach().clone()
        tensor.data = copies[key]


def _file_of(tensor: torch.Tensor, files: list[tuple[int, int]]) -> tuple[int, int] | None:
    """The one of these mapped files, in address order, that the tensor is a view of."""
    index = bisect_right(files, tensor.data_ptr(), key=lambda file: file[0]) - 1
    is_view = tensor.device.type == "cpu" and index >= 0 and tensor.data_ptr() < files[index][1]
    return files[index] if is_view else None


def _mapped_files() -> list[tuple[int, int]]:
    """(start, end) of each mapped safetensors file, in address order."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        if line.endswith(".safetensors"):
            start, _, end = line.split(maxsplit=1)[0].partition("-")
            files.append((int(start, 16), int(end, 16)))
    return files
