"""Device: where a model runs, settled before anything is loaded. Imports torch late."""

from __future__ import annotations

import re
from typing import Any


def choose_device(wanted: str | None, *, is_loaded: bool = False) -> str | None:
    """The device asked for, checked; without one the GPU where there is one, else the CPU.

    None: leave a loaded model where it is. Raises ValueError for a device that is not there.
    """
    if wanted is None and is_loaded:
        return None
    import torch

    if wanted is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    match = re.fullmatch(r"(cpu|cuda)(?::(\d+))?", str(wanted))
    if match is None:
        raise ValueError(f"device must be 'cpu', 'cuda' or 'cuda:N', got {str(wanted)!r}")
    if match[1] == "cuda":
        _check_cuda(torch, str(wanted), int(match[2] or 0))
    return str(wanted)


def _check_cuda(torch: Any, wanted: str, index: int) -> None:
    if not torch.cuda.is_available():
        why = "the driver finds no GPU, or is too old for it"
        if torch.version.cuda is None:
            why = "it is built without CUDA; see https://pytorch.org for a build with it"
        raise ValueError(f"device is {wanted!r}, but torch {torch.__version__} sees no GPU: {why}")
    count = torch.cuda.device_count()
    if index >= count:
        there = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise ValueError(f"device is {wanted!r}, but there is only {there}")
