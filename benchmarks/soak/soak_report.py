"""What a soak found: counts, samples of memory, levels before and after, and problems."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

MIN_SAMPLES = 16
MAX_GROWTH = 1.05
"""The resident set is flat if its median in the last quarter of the time is at most this times
the median in the second quarter. The first quarter is left out: caches fill, allocators learn."""
WARM_UP = 1 / 3
"""Of the time, before a slope is fitted."""
NUM_BLOCKS = 40
"""The slope is fitted to medians of so many blocks of samples: neighbouring samples say the same,
and would make its error look smaller than it is."""
MAX_SLOPE_MIB_PER_HOUR = 1.0
LONG_S = 1800.0
"""The slope is judged from this length on; below it, its error says too little."""
MAX_ROWS = 600
"""Samples in the JSON."""
SHOWN_COUNTERS = (
    "num_preemptions",
    "chunks_aliased",
    "chunks_copied",
    "chunks_evicted",
    "chunks_swapped_out",
    "request_success",
)


class Slope(NamedTuple):
    """Growth of the anonymous resident set, in MiB an hour, and its standard error."""

    mib_per_hour: float
    error: float

    def __str__(self) -> str:
        return f"{self.mib_per_hour:+.2f} +- {self.error:.2f} MiB per hour"


def fit_slope(times_s: Sequence[float], sizes_bytes: Sequence[float]) -> Slope:
    """Least squares, with the standard error of the slope. REQUIRES: three points at least."""
    slope, intercept = statistics.linear_regression(times_s, sizes_bytes)
    rest = [y - slope * x - intercept for x, y in zip(times_s, sizes_bytes, strict=True)]
    mean_s = statistics.fmean(times_s)
    spread = sum((x - mean_s) ** 2 for x in times_s)
    error = math.sqrt(sum(r * r for r in rest) / (len(rest) - 2) / spread)
    return Slope(slope * 3600 / (1 << 20), error * 3600 / (1 << 20))


def slope_of(samples: Sequence[tuple[float, float]]) -> Slope | None:
    """After the warm-up, through the medians of blocks of (seconds, bytes); None: too few."""
    if not samples:
        return None
    start_s = samples[-1][0] * WARM_UP
    late = [one for one in samples if one[0] >= start_s]
    if len(late) < NUM_BLOCKS:
        return None
    cuts = [len(late) * part // NUM_BLOCKS for part in range(NUM_BLOCKS + 1)]
    blocks = [late[first:end] for first, end in pairwise(cuts)]
    return fit_slope(
        [statistics.fmean(at_s for at_s, _ in block) for block in blocks],
        [statistics.median(size for _, size in block) for block in blocks],
    )


@dataclass
class SoakReport:
    """`problems` must stay empty."""

    counts: Counter[str] = field(default_factory=Counter)
    """What was asked, by kind; and administration, by path and status."""
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    slowest_s: float = 0.0
    """From a request to all of its answer, or a dialogue's, the longest."""
    samples: list[tuple[float, int, int]] = field(default_factory=list)
    """(seconds since the start, anonymous resident bytes, bytes behind the KV pool)."""
    rests: list[tuple[float, int]] = field(default_factory=list)
    """(seconds since the start, anonymous resident bytes), nobody asking, the engine asleep."""
    before: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)
    counters: Counter[str] = field(default_factory=Counter)
    """The server's own counters, /metrics, at the end less at the start."""

    def problem(self, text: str) -> None:
        self.problems.append(text[:500])

    @property
    def num_requests(self) -> int:
        return sum(count for kind, count in self.counts.items() if not kind.startswith("/"))

    @property
    def quarters_bytes(self) -> list[float]:
        """Medians of the anonymous resident set, one for each quarter of the time."""
        found = [size for _, size, _ in self.samples]
        if len(found) < MIN_SAMPLES:
            return []
        cuts = [len(found) * part // 4 for part in range(5)]
        return [statistics.median(found[cuts[part] : cuts[part + 1]]) for part in range(4)]

    @property
    def slope(self) -> Slope | None:
        """At all times, steps with their activations among them. None: too few samples."""
        return slope_of([(at_s, size) for at_s, size, _ in self.samples])

    @property
    def slope_at_rest(self) -> Slope | None:
        """While nobody asks and the engine sleeps: what is kept, without what a request needs."""
        return slope_of(self.rests)

    def judge(self) -> None:
        """Adds what the numbers themselves say: something was left behind, memory grew."""
        if any(size > self.before.get(name, 0) for name, size in self.after.items()):
            self.problem(f"left behind: {self.before} before, {self.after} after")
        quarters = self.quarters_bytes
        if quarters and quarters[3] > MAX_GROWTH * quarters[1]:
            self.problem(f"the resident set grew: medians of the quarters are {quarters} bytes")
        if self.seconds >= LONG_S:
            self._judge_slopes()
        if failed := self.counters["request_success.error"]:
            self.problem(f"{failed} requests failed in the engine")

    def _judge_slopes(self) -> None:
        """At rest the slope is known well, and has to be small for sure; at work it must not be
        large for sure."""
        slope, rest = self.slope, self.slope_at_rest
        if slope and slope.mib_per_hour - 2 * slope.error > MAX_SLOPE_MIB_PER_HOUR:
            self.problem(f"the resident set grows: {slope}")
        if rest and rest.mib_per_hour + 2 * rest.error > MAX_SLOPE_MIB_PER_HOUR:
            self.problem(f"the resident set at rest may grow: {rest}")

    def table(self) -> str:
        """For people and for README.md."""
        mib = [f"{number / (1 << 20):.1f}" for number in self.quarters_bytes]
        pool = [size for _, _, size in self.samples]
        rows = [("seconds", f"{self.seconds:.0f}"), ("requests", str(self.num_requests))]
        rows += [("slowest request, s", f"{self.slowest_s:.1f}")]
        rows += [(f"  {kind}", str(count)) for kind, count in sorted(self.counts.items())]
        rows += [
            (f"server: {name}", str(count))
            for name, count in sorted(self.counters.items())
            if name.startswith(SHOWN_COUNTERS)
        ]
        rows += [("resident set, medians of quarters, MiB", ", ".join(mib) or "too short")]
        rows += [("resident set, slope after a third", str(self.slope or "too short"))]
        rows += [("  the same at rest", str(self.slope_at_rest or "too short"))]
        if pool:
            rows += [("KV pool, least and most, MiB", f"{min(pool) >> 20}, {max(pool) >> 20}")]
        rows += [
            (f"{name}, before and after", f"{self.before[name]}, {self.after.get(name)}")
            for name in self.before
        ]
        rows += [("problems", str(len(self.problems)))]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)

    def as_json(self) -> dict[str, Any]:
        every = -(-len(self.samples) // MAX_ROWS) or 1
        return {
            "num_requests": self.num_requests,
            "counts": dict(self.counts),
            "problems": self.problems,
            "seconds": round(self.seconds, 1),
            "slowest_s": round(self.slowest_s, 1),
            "before": self.before,
            "after": self.after,
            "counters": dict(self.counters),
            "resident_quarters_bytes": self.quarters_bytes,
            "resident_max_growth": MAX_GROWTH,
            "resident_slope": self.slope and self.slope._asdict(),
            "resident_slope_at_rest": self.slope_at_rest and self.slope_at_rest._asdict(),
            "samples": {
                "columns": ["seconds", "resident_anonymous_bytes", "pool_bytes"],
                "rows": [[round(at_s, 1), *sizes] for at_s, *sizes in self.samples[::every]],
            },
            "rests": {
                "columns": ["seconds", "resident_anonymous_bytes"],
                "rows": [[round(at_s, 1), size] for at_s, size in self.rests],
            },
        }
