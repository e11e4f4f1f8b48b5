"""TorchMemory: torch's allocator and the KV pool share a GPU, and each gives way to the other.

    the pool is refused memory   torch gives its cached blocks back; the pool's call is tried again
    torch runs out of memory     the pool forgets prefixes and gives free chunks back; the
                                 step is tried again (torch's own call has failed by then)

Torch tells of its shortage by an observer, which it cannot forget: one stays for the process, and
pools come and go. Thread-safety: all of it may be called from any thread.
"""

from __future__ import annotations

import logging
import threading
import weakref
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import torch

from flexinfer.memory.budget import format_bytes

if TYPE_CHECKING:
    from flexinfer.vtensor import VTensorManager

logger = logging.getLogger(__name__)

MIN_CACHED_BYTES = 2 << 20
"""Less than one segment of torch's is not worth a synchronisation with the GPU."""


class Allocator(Protocol):
    """What is asked of torch."""

    def cached_bytes(self) -> int:
        """Memory that it holds and does not use."""
        ...

    def empty_cache(self) -> None:
        """Give that back to the device; waits for running kernels."""
        ...


class CudaAllocator:
    """Torch's caching allocator of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def cached_bytes(self) -> int:
        reserved = torch.cuda.memory_reserved(self._device)
        return int(reserved - torch.cuda.memory_allocated(self._device))

    def empty_cache(self) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.empty_cache()


class NoAllocator:
    """Of a CPU: torch keeps nothing there."""

    def cached_bytes(self) -> int:
        return 0

    def empty_cache(self) -> None:
        return


class TorchMemory:
    """The agreement of one pool with torch."""

    def __init__(self, manager: VTensorManager, allocator: Allocator) -> None:
        self._manager = manager
        self._allocator = allocator
        self._lock = threading.Lock()

    @staticmethod
    def is_shortage(error: BaseException) -> bool:
        """Whether a step failed because torch, or a library that it calls, got no GPU memory."""
        if isinstance(error, torch.cuda.OutOfMemoryError):
            return True
        text = str(error)
        return isinstance(error, RuntimeError) and (
            "CUBLAS_STATUS_ALLOC_FAILED" in text or "CUDA error: out of memory" in text
        )

    def give_to_pool(self) -> bool:
        """Ask torch for what it does not use. False: nothing, so trying again is useless."""
        with self._lock:
            cached_bytes = self._allocator.cached_bytes()
            if cached_bytes < MIN_CACHED_BYTES:
                return False
            self._allocator.empty_cache()
            given_bytes = cached_bytes - self._allocator.cached_bytes()
        logger.info("torch gave %s back to the KV pool", format_bytes(given_bytes))
        return given_bytes > 0

    def give_to_torch(self, num_bytes: int) -> int:
        """Give the device at least `num_bytes` of the pool's memory, if that much is not in use:
        free chunks first, then those of the prefixes used longest ago. Returns bytes."""
        manager = self._manager
        if manager.closed or manager.asleep:
            return 0
        given_bytes = manager.trim()
        if given_bytes < num_bytes and manager.evict(num_bytes - given_bytes) > 0:
            given_bytes += manager.trim()
        if given_bytes > 0:
            logger.info("the KV pool gave %s back to torch", format_bytes(given_bytes))
        return given_bytes


def share_device(manager: VTensorManager, device: torch.device) -> TorchMemory:
    """Make the pool of `manager` and torch give way to each other on this device."""
    if device.type != "cuda":
        return TorchMemory(manager, NoAllocator())
    memory = TorchMemory(manager, CudaAllocator(device))
    manager.on_shortage = memory.give_to_pool
    watch(device.index or 0, memory)
    return memory


# The observer.

_watching: weakref.WeakKeyDictionary[TorchMemory, int] = weakref.WeakKeyDictionary()
_watching_lock = threading.Lock()


def watch(device_index: int, memory: TorchMemory) -> None:
    """Let `memory` give way, as long as it lives, when torch runs out on that device."""
    with _watching_lock:
        _watching[memory] = device_index
    _attach_observer()


@cache
def _attach_observer() -> None:
    attach: Any = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    # To attach starts CUDA, which raises where a CUDA build of torch finds no driver.
    if attach is None or not torch.cuda.is_available():
        logger.info("torch cannot tell of its shortage here: only failed steps are tried again")
        return
    attach(on_torch_out_of_memory)


def on_torch_out_of_memory(
    device_index: int, asked_bytes: int, device_total: int, device_free: int
) -> None:
    """Torch's observer: it is about to raise OutOfMemoryError in the thread that calls this."""
    with _watching_lock:
        memories = [memory for memory, index in _watching.items() if index == device_index]
    try:
        for memory in memories:
            memory.give_to_torch(asked_bytes)
    except Exception:  # nothing may leave an observer; torch's own error follows
        logger.exception("the KV pool could not give memory back")
