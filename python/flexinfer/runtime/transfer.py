"""Small tensors from the host to a device, without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def to_device(
    values: Sequence[float] | Sequence[int] | Sequence[bool],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """[len(values)]. From pageable memory the copy would wait for all kernels before it: on CUDA
    it goes through pinned memory, which torch's allocator keeps until it is over."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
