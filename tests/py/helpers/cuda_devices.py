"""Which CUDA devices tests see. Imports no torch, which would look for itself."""

from __future__ import annotations

import ctypes
import re


def hides_gpus(marker_expression: str) -> bool:
    """Whether tests chosen by `-m` are to see no GPU: all but those that want one. Most are for the
    CPU, with little memory and small chunks, and would run on whatever device a machine has."""
    return re.search(r"(?<!not )\bgpu\b", marker_expression) is None


def num_cuda_devices() -> int:
    """Devices that the installed NVIDIA driver offers; 0 without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value
