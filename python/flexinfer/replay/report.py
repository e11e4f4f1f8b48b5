"""What a replay found, as plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from flexinfer.vtensor import DriverCalls

__all__ = ["ReplayReport", "Shortage", "Totals"]


@dataclass
class Totals:
    """Numbers of a whole run; times are microseconds in the driver."""

    peak_resident_bytes: int = 0
    prefix_hit_tokens: int = 0
    chunks_aliased: int = 0
    chunks_copied: int = 0
    chunks_evicted: int = 0
    chunks_adopted: int = 0
    chunks_deduplicated: int = 0
    chunks_given_back: int = 0
    chunks_swapped_out: int = 0
    chunks_swapped_in: int = 0
    num_shortages: int = 0
    driver_us_exposed: float = 0.0
    driver_us_hidden: float = 0.0
    driver_calls: dict[str, DriverCalls] = field(default_factory=dict)


@dataclass(frozen=True)
class Shortage:
    """An operation that had memory when it was recorded and had none in the replay."""

    line: int
    op: str
    vtensor: int
    label: str


@dataclass
class ReplayReport:
    """What a replay found. ``recorded`` is the traced run, ``replayed`` this one.

    Waste is resident bytes minus the bytes of distinct tokens, at the peak of resident bytes and as
    the mean over samples; ``peak_mapped_bytes`` is the highest of these samples.
    """

    path: str
    device: str
    chunk_bytes: int
    layers_per_plane: int
    memory_budget_bytes: int
    truncated: bool
    num_operations: int = 0
    num_skipped: int = 0
    operations: dict[str, int] = field(default_factory=dict)
    wall_s: float = 0.0
    peak_mapped_bytes: int = 0
    waste_at_peak_bytes: int = 0
    mean_waste_bytes: float = 0.0
    mean_resident_bytes: float = 0.0
    shortages: list[Shortage] = field(default_factory=list)
    num_shortages_avoided: int = 0
    recorded: Totals = field(default_factory=Totals)
    replayed: Totals = field(default_factory=Totals)

    def as_dict(self) -> dict[str, Any]:
        """All numbers as plain values, for JSON."""
        out = asdict(self)
        for run in (out["recorded"], out["replayed"]):
            run["driver_calls"] = {kind: c.as_dict() for kind, c in run["driver_calls"].items()}
        return out
