"""What a soak found: counts, samples of memory, levels before and after, and problems."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

MIN_SAMPLES = 16
MAX_GROWTH = 1.05
"""The resident set is flat if its median in the last quarter of the time is at most this times
the median in the second quarter. The first quarter is left out: caches fill, allocators learn."""
SHOWN_COUNTERS = (
    "num_preemptions",
    "chunks_aliased",
    "chunks_copied",
    "chunks_evicted",
    "chunks_swapped_out",
    "request_success",
)


@dataclass
class SoakReport:
    """`problems` must stay empty."""

    counts: Counter[str] = field(default_factory=Counter)
    """What was asked, by kind; and administration, by path and status."""
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    samples: list[tuple[float, int, int]] = field(default_factory=list)
    """(seconds since the start, anonymous resident bytes, bytes behind the KV pool)."""
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

    def judge(self) -> None:
        """Adds what the numbers themselves say: something was left behind, memory grew."""
        if any(size > self.before.get(name, 0) for name, size in self.after.items()):
            self.problem(f"left behind: {self.before} before, {self.after} after")
        quarters = self.quarters_bytes
        if quarters and quarters[3] > MAX_GROWTH * quarters[1]:
            self.problem(f"the resident set grew: medians of the quarters are {quarters} bytes")
        if failed := self.counters["request_success.error"]:
            self.problem(f"{failed} requests failed in the engine")

    def table(self) -> str:
        """For people and for README.md."""
        mib = [f"{number / (1 << 20):.1f}" for number in self.quarters_bytes]
        pool = [size for _, _, size in self.samples]
        rows = [("seconds", f"{self.seconds:.0f}"), ("requests", str(self.num_requests))]
        rows += [(f"  {kind}", str(count)) for kind, count in sorted(self.counts.items())]
        rows += [
            (f"server: {name}", str(count))
            for name, count in sorted(self.counters.items())
            if name.startswith(SHOWN_COUNTERS)
        ]
        rows += [("resident set, medians of quarters, MiB", ", ".join(mib) or "too short")]
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
        return {
            "num_requests": self.num_requests,
            "counts": dict(self.counts),
            "problems": self.problems,
            "seconds": round(self.seconds, 1),
            "before": self.before,
            "after": self.after,
            "counters": dict(self.counters),
            "resident_quarters_bytes": self.quarters_bytes,
            "resident_max_growth": MAX_GROWTH,
            "samples": {
                "columns": ["seconds", "resident_anonymous_bytes", "pool_bytes"],
                "rows": [[round(at_s, 1), *sizes] for at_s, *sizes in self.samples],
            },
        }
