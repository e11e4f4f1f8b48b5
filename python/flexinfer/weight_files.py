"""Weight files: letting go of a safetensors file whose weights have been packed elsewhere.

safetensors maps a file as a whole, and each weight that needs no conversion is a view of it: one
that is left keeps the pages of all in the process's resident set.
"""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path

import torch

KEPT_SHARE = 0.5
"""A file of which more than this is in use stays mapped: copying its weights would save little."""


def let_go_of_files(model: torch.nn.Module) -> int:
    """Copy the parameters and buffers of files that are mostly unused by now; returns bytes copied.

    Nothing happens where there is no /proc.
    """
    files = _mapped_files()
    starts = [start for start, _ in files]
    tensors: dict[int, list[torch.Tensor]] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        file = bisect_right(starts, tensor.data_ptr()) - 1
        if tensor.device.type == "cpu" and file >= 0 and tensor.data_ptr() < files[file][1]:
            tensors.setdefault(file, []).append(tensor)
    num_bytes = 0
    for file, used in tensors.items():
        start, end = files[file]
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
