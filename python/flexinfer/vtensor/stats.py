"""Stats: the numbers of a vTensor manager, as plain values."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class DriverCalls:
    """Calls of one kind to the driver, and the microseconds they took; ``hidden_us`` of these were
    spent by the background worker."""

    calls: int
    us: float
    hidden_us: float = 0.0


@dataclass(frozen=True)
class Stats:
    """Numbers of a manager: bytes are of now, counts are totals since the start.

    ``reserved``, ``mapped``, ``parked`` and ``held`` bytes are virtual; ``resident``, ``shared``,
    ``free`` and ``recorded`` bytes are physical. ``saved`` is what sharing saves: bytes mapped by
    live vTensors minus their distinct chunks.
    """

    reserved_bytes: int
    mapped_bytes: int
    resident_bytes: int
    shared_bytes: int
    saved_bytes: int
    free_bytes: int
    parked_bytes: int
    held_bytes: int
    recorded_bytes: int
    swapped_bytes: int
    asleep_bytes: int
    budget_bytes: int
    obtainable_bytes: int
    num_vtensors: int
    num_free_slots: int
    recorded_tokens: int
    prefix_queries: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    chunks_aliased: int
    chunks_copied: int
    chunks_evicted: int
    chunks_adopted: int
    chunks_deduplicated: int
    dedup_failures: int
    chunks_swapped_out: int
    chunks_swapped_in: int
    pre_extend_failures: int
    map_us_exposed: float
    map_us_hidden: float
    driver_calls: dict[str, DriverCalls]

    def as_dict(self) -> dict[str, Any]:
        """All numbers as plain values, for JSON."""
        out = {field.name: getattr(self, field.name) for field in fields(self)}
        out["driver_calls"] = {kind: vars(calls) for kind, calls in self.driver_calls.items()}
        return out
