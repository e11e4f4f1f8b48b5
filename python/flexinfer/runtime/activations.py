"""Activations: tensors on the CPU that a step makes and drops, from memory that can serve again.

torch asks malloc for a multiple of 64. glibc (2.36) finds room for that only where 100 bytes
more are free, so that what a dropped activation leaves never takes another of its size: a prefill
of 512 tokens had 19 MiB in use at once and kept 44 of the heap, now 23. numpy asks for bytes; the
multiple is found in them. It takes 5 us in place of 1.5, so small tensors come from torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

LARGE_BYTES = 128 << 10
ALIGNMENT = 64
"""As torch's: a cache line, and the widest vector."""


def empty_activation(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """torch.empty(shape, dtype=dtype) on the CPU."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < LARGE_BYTES:
        return torch.empty(shape, dtype=dtype)
    memory = torch.from_numpy(np.empty(num_bytes + ALIGNMENT, np.uint8))
    first = -memory.data_ptr() % ALIGNMENT
    return memory[first : first + num_bytes].view(dtype).view(*shape)
