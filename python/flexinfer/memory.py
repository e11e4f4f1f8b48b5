"""KVMemory: how much memory the KV cache gets when nobody says, and why. No torch."""

from __future__ import annotations

import logging
from dataclasses import dataclass

logger = logging.getLogger(__name__)

CPU_FRACTION = 0.5
"""Of what this machine and its container can still give: the model's activations, the page cache
and other processes need the rest, and a container that runs out is killed, not told."""

GPU_FRACTION = 0.9
"""Of what the device has free once the weights are loaded."""

EAGER_CHUNK_BYTES = 2 << 20


@dataclass(frozen=True)
class KVMemory:
    """A budget for physical KV memory."""

    budget_bytes: int
    reason: str
    """In words: what it is derived from."""

    def __str__(self) -> str:
        return f"KV cache memory: {format_bytes(self.budget_bytes)} ({self.reason})"


def choose_kv_memory(
    wanted: int | str | None, available_bytes: int, *, is_gpu: bool = False
) -> KVMemory:
    """What was asked for, or a fraction of what is available; logged once.

    `available_bytes`: on a CPU the least of the free memory and what each container limit leaves.
    Raises ValueError for text that is no size, or sizes below 1.
    """
    from flexinfer.vtensor import parse_bytes

    if wanted is not None:
        budget = parse_bytes(wanted, "kv_cache_memory_bytes")
        if budget < 1:
            raise ValueError(f"kv_cache_memory_bytes must be positive, got {wanted!r}")
        memory = KVMemory(budget, "as asked for")
    else:
        memory = _derived(available_bytes, is_gpu)
    logger.info("%s", memory)
    return memory


def _derived(available_bytes: int, is_gpu: bool) -> KVMemory:
    fraction = GPU_FRACTION if is_gpu else CPU_FRACTION
    where = (
        "free on the device"
        if is_gpu
        else "available: the least of free memory and what the container's limits leave"
    )
    return KVMemory(
        int(available_bytes * fraction),
        f"{fraction:.0%} of {format_bytes(available_bytes)} {where}",
    )


def choose_eager_bytes(
    low: int | str | None, high: int | str | None, *, num_chunks: int, budget: int
) -> tuple[int, int | None]:
    """The watermarks of free memory, (low, high) in bytes: see `EngineConfig.free_memory_low`.

    `num_chunks`: of a row for each request that may run.

    Raises ValueError if low is above high.
    """
    from flexinfer.vtensor import parse_bytes

    high_bytes = None if high is None else parse_bytes(high, "free_memory_high")
    if low is None:
        low_bytes = min(num_chunks * EAGER_CHUNK_BYTES, budget // 32)
        low_bytes = low_bytes if high_bytes is None else min(low_bytes, high_bytes)
    else:
        low_bytes = parse_bytes(low, "free_memory_low")
    if high_bytes is not None and low_bytes > high_bytes:
        raise ValueError(
            f"free_memory_low ({low_bytes} bytes) must not be above free_memory_high "
            f"({high_bytes} bytes)"
        )
    return low_bytes, high_bytes


def format_bytes(num_bytes: int) -> str:
    """For people: '1.5 GiB', and the exact number of bytes where that is short."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"
