"""KVMemory: how much memory the KV cache gets by default, and why. No torch."""

from __future__ import annotations

import logging
from dataclasses import dataclass

logger = logging.getLogger(__name__)

CPU_FRACTION = 0.5
"""Of what this machine and its container can still give: the model's activations, the page cache
and other processes need the rest, and a container that runs out is killed, not told."""

HEADROOM_BYTES = 256 << 20
"""What the host driver leaves of available memory (`reserve_headroom_bytes`): with less it gives
none, whatever the budget says."""

LEAST_OF = "the least of free memory and what the container's limits leave"
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
    wanted: int | str | None,
    available_bytes: int,
    *,
    gpu_bytes: int | None = None,
    gpu_memory_utilization: float = 0.9,
) -> KVMemory:
    """What was asked for, or a fraction of what is available; logged once.

    `available_bytes`: on a CPU the least of the free memory and what each container limit leaves;
    on a GPU, which has `gpu_bytes` in all, what is free beside weights and activations.
    Raises ValueError for text that is not a size, for sizes below 1, and if nothing is left.
    """
    from flexinfer.vtensor import parse_bytes

    if gpu_bytes is None and available_bytes <= HEADROOM_BYTES:
        raise ValueError(
            f"no memory is left for KV: {format_bytes(available_bytes)} are available "
            f"({LEAST_OF}), and {format_bytes(HEADROOM_BYTES)} of them are kept as headroom, since "
            "a container that runs out is killed: give it more, or take a smaller model"
        )
    if wanted is not None:
        budget = parse_bytes(wanted, "kv_cache_memory_bytes")
        if budget < 1:
            raise ValueError(f"kv_cache_memory_bytes must be positive, got {wanted!r}")
        if budget > available_bytes:
            logger.warning(
                "the KV budget of %s is more than the %s that are available%s: memory is mapped "
                "as it is needed, so requests may fail when it runs out: lower "
                "kv_cache_memory_bytes",
                format_bytes(budget),
                format_bytes(available_bytes),
                "" if gpu_bytes is not None else f" ({LEAST_OF})",
            )
        memory = KVMemory(budget, "as asked for")
    elif gpu_bytes is not None:
        memory = _rest_of_gpu(available_bytes, gpu_bytes, gpu_memory_utilization)
    else:
        budget, part = int(available_bytes * CPU_FRACTION), f"{CPU_FRACTION:.0%}"
        if available_bytes - HEADROOM_BYTES < budget:
            budget = available_bytes - HEADROOM_BYTES
            part = f"all but {format_bytes(HEADROOM_BYTES)} of headroom"
        memory = KVMemory(
            budget,
            f"{part} of {format_bytes(available_bytes)} available: {LEAST_OF}",
        )
    logger.info("%s", memory)
    return memory


def _rest_of_gpu(free_bytes: int, gpu_bytes: int, utilization: float) -> KVMemory:
    """The part of the GPU that may be used, less what is used; `utilization` is vLLM's setting."""
    taken_bytes = gpu_bytes - free_bytes
    budget = int(gpu_bytes * utilization) - taken_bytes
    if budget < 1:
        raise ValueError(
            f"no GPU memory is left for KV: {format_bytes(taken_bytes)} of "
            f"{format_bytes(gpu_bytes)} are taken, by the model or other processes, and "
            f"gpu_memory_utilization is {utilization}: raise it, or free memory"
        )
    return KVMemory(
        budget,
        f"{utilization:.0%} of the GPU's {format_bytes(gpu_bytes)}, less "
        f"{format_bytes(taken_bytes)} taken by weights, activations and others",
    )


def choose_eager_bytes(
    low: int | str | None, high: int | str | None, *, num_chunks: int, budget: int
) -> tuple[int, int | None]:
    """The bounds of free memory, (low, high) in bytes: see `EngineConfig.free_memory_low`.

    `num_chunks`: of a row for each request that may run.

    Raises ValueError if low is above high.
    """
    from flexinfer.vtensor import parse_bytes

    high_bytes = None if high is None else parse_bytes(high, "free_memory_high")
    if low is None:
        low_bytes = min(num_chunks * EAGER_CHUNK_BYTES, budget // 16)
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
