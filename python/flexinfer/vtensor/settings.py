"""Settings of a VTensorManager, from what callers say to what the core takes: its device, sizes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from flexinfer import _vtensor
from flexinfer.runtime.units import parse_bytes
from flexinfer.vtensor.spec import KVSpec

_HUGE_PAGE_BYTES = 2 << 20
_DEFAULT_BUDGET_FRACTION = 0.5


def available_memory_bytes() -> int:
    """Bytes that this machine, or the container around this process, can still give."""
    return int(_vtensor.available_bytes())


@dataclass(frozen=True)
class SimConfig:
    """What ``device="sim"`` simulates.

    Attributes:
        latency: ``"none"``, or ``"a100"`` for the published costs of CUDA's calls at 2 MiB.
        real_time: calls really take that long; otherwise it is only counted, in all times that
            :class:`Stats` and traces tell.
        capacity: bytes of the device; None: the manager's budget is the only bound.
        granularity: bytes that chunk sizes are multiples of.
    """

    latency: Literal["none", "a100"] = "none"
    real_time: bool = False
    capacity: int | str | None = None
    granularity: int = 4096


def simulate(sim: SimConfig, config: _vtensor.DriverConfig) -> None:
    """Have the driver be what ``sim`` says. Raises ValueError for settings that make no sense."""
    if sim.latency not in ("none", "a100"):
        raise ValueError(f"latency is one of 'none', 'a100', got {sim.latency!r}")
    config.a100_latency = sim.latency == "a100"
    config.real_time = sim.real_time
    config.granularity_bytes = sim.granularity
    if sim.capacity is not None:
        config.capacity_bytes = parse_bytes(sim.capacity, "capacity")


def choice(enum: Any, name: str, argument: str) -> Any:
    try:
        return getattr(enum, name.upper())
    except AttributeError:
        known = ", ".join(repr(str(member.name).lower()) for member in enum)
        raise ValueError(f"{argument} is one of {known}, got {name!r}") from None


def driver_config(device: str, unmapped: str | None) -> _vtensor.DriverConfig:
    match = re.fullmatch(r"(cpu|sim|cuda)(?::(\d+))?", str(device))
    if match is None:
        raise ValueError(f"device is 'cpu', 'cuda', 'cuda:N' or 'sim', got {device!r}")
    config = _vtensor.DriverConfig()
    config.kind = "host" if match[1] == "cpu" else match[1]
    config.device_index = int(match[2] or 0)
    config.unmapped = choice(
        _vtensor.UnmappedPolicy, unmapped or ("guard" if match[1] == "cuda" else "zero"), "unmapped"
    )
    return config


def choose_budget(memory_budget: int | str | None) -> int:
    if memory_budget is None:
        return int(available_memory_bytes() * _DEFAULT_BUDGET_FRACTION)
    budget = parse_bytes(memory_budget, "memory_budget")
    if budget < 1:
        raise ValueError(f"memory_budget must be positive, got {memory_budget!r}")
    return budget


def choose_chunk_bytes(
    chunk_bytes: int | str | None, spec: KVSpec, driver: _vtensor.DriverConfig, budget: int
) -> int:
    """The chunk size asked for, or a default: 2 MiB, but never so large that the budget holds
    fewer than 64 chunks per plane, or one chunk holds more than a range."""
    if chunk_bytes is not None:
        size = parse_bytes(chunk_bytes, "chunk_bytes")
        if size < 1:
            raise ValueError(f"chunk_bytes must be positive, got {chunk_bytes!r}")
        return size
    size = _HUGE_PAGE_BYTES
    if driver.kind == "cuda":
        return size
    limit = min(budget // (64 * spec.num_planes), spec.max_seq_len * spec.plane_token_bytes)
    while size > limit and size > 4096:
        size //= 2
    return size
