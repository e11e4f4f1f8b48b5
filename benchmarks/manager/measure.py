"""Series: microseconds of one operation, and how many of them the driver took. One thread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from flexinfer.vtensor import VTensorManager

Result = TypeVar("Result")


@dataclass
class Series:
    """Wall time and driver time of each call."""

    wall_us: list[float] = field(default_factory=list)
    driver_us: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Median, tenth and ninetieth percentile, and the driver's median and its share."""
        median = statistics.median(self.wall_us)
        driver = statistics.median(self.driver_us)
        ordered = sorted(self.wall_us)
        return {
            "median_us": round(median, 2),
            "p10_us": round(ordered[len(ordered) // 10], 2),
            "p90_us": round(ordered[9 * len(ordered) // 10], 2),
            "driver_us": round(driver, 2),
            "bookkeeping_us": round(
                statistics.median(
                    wall - driver for wall, driver in zip(self.wall_us, self.driver_us, strict=True)
                ),
                2,
            ),
            "driver_share": round(driver / median, 3),
            "count": len(self.wall_us),
        }


def timed(
    series: Series, manager: VTensorManager, operation: Callable[..., Result], *arguments: Any
) -> Result:
    """Call once, as a user does from Python; the driver's part is read outside of the timing."""
    before = driver_us(manager)
    start = time.perf_counter_ns()
    result = operation(*arguments)
    end = time.perf_counter_ns()
    series.wall_us.append((end - start) / 1e3)
    series.driver_us.append(driver_us(manager) - before)
    return result


def driver_us(manager: VTensorManager) -> float:
    """Microseconds that driver calls have taken so far, in the threads of callers."""
    return sum(calls.us - calls.hidden_us for calls in manager.stats().driver_calls.values())
