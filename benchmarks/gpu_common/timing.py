"""Times of device work: medians by CUDA events, from a graph where one can be captured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

L2_FLUSH_BYTES = 256 << 20
"""Written between two repetitions: several times the L2 of an H200 (60 MB)."""


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call."""

    median_us: float
    p10_us: float
    p90_us: float
    repetitions: int
    graph: bool
    """The call was replayed from a CUDA graph, so that launching it costs nothing."""


class Timer:
    """Times calls on one device; keeps the buffer that flushes the cache."""

    def __init__(self, device: str, seconds_a_call: float = 0.2, max_repetitions: int = 60) -> None:
        self._device = device
        self._seconds = seconds_a_call
        self._max_repetitions = max_repetitions
        size = L2_FLUSH_BYTES if device == "cuda" else 1 << 20
        self._flush = torch.empty(size, dtype=torch.uint8, device=device)

    def time(self, call: Callable[[], object], *, graph: bool = True) -> Timing:
        """Median of repeated calls, each on a cold L2."""
        if self._device == "cpu":
            return self._time_cpu(call)
        captured = self._capture(call) if graph else None
        run = captured.replay if captured is not None else call
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        count = self._count(time.perf_counter() - start)
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(count)
        ]
        for before, after in events:
            self._flush.zero_()
            before.record()
            run()
            after.record()
        torch.cuda.synchronize()
        times = [before.elapsed_time(after) * 1e3 for before, after in events]
        return summary(times, graph=captured is not None)

    def _count(self, seconds_once: float) -> int:
        return max(5, min(self._max_repetitions, int(self._seconds / max(seconds_once, 1e-6))))

    def _time_cpu(self, call: Callable[[], object]) -> Timing:
        call()
        start = time.perf_counter()
        call()
        times = []
        for _ in range(self._count(time.perf_counter() - start)):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
        return summary(times, graph=False)

    def _capture(self, call: Callable[[], object]) -> torch.cuda.CUDAGraph | None:
        """A graph of the call; None where it can not be captured (it is timed eagerly then)."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
            call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                call()
        except RuntimeError:
            with suppress(RuntimeError):
                torch.cuda.synchronize()
            return None
        return graph


def summary(times_us: Sequence[float], *, graph: bool) -> Timing:
    ordered = sorted(times_us)
    return Timing(
        median_us=round(statistics.median(ordered), 2),
        p10_us=round(ordered[len(ordered) // 10], 2),
        p90_us=round(ordered[9 * len(ordered) // 10], 2),
        repetitions=len(ordered),
        graph=graph,
    )


def copy_bandwidth_gb_s(device: str, size_bytes: int = 2 << 30) -> float:
    """Bytes read and written a second by a copy: the ceiling for kernels that stream."""
    source = torch.empty(
        size_bytes if device == "cuda" else 32 << 20, dtype=torch.uint8, device=device
    )
    target = torch.empty_like(source)
    timing = Timer(device).time(lambda: target.copy_(source))
    return round(2 * source.numel() / timing.median_us / 1e3, 1)
