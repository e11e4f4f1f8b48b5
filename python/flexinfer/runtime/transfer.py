"""Small tensors between the host and a device, without waiting for the device."""

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


class HostCopy:
    """A tensor on its way to the host; what is issued after it is not waited for."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._host = tensor
        self._copied: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def tolist(self) -> list[int]:
        """The values; waits for them."""
        if self._copied is not None:
            self._copied.synchronize()
        values: list[int] = self._host.tolist()
        return values
