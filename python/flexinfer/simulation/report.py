"""What a fleet's run came to, as numbers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from flexinfer.simulation.fleet import FleetRun

PERCENTILES = (50, 90, 99)


def summarise(run: FleetRun, bytes_per_token: int) -> dict[str, Any]:
    """Times in milliseconds of virtual time. Requests that failed count in `num_failed` alone."""
    done = [request for request in run.requests if request.error is None]
    prompt_tokens = sum(request.num_prompt_tokens for request in done)
    ttft_ms = [
        1e3 * (request.first_token_s - request.arrival_s)
        for request in done
        if request.first_token_s is not None
    ]
    e2el_ms = [
        1e3 * (request.end_s - request.arrival_s) for request in done if request.end_s is not None
    ]
    output_tokens = sum(request.num_output_tokens for request in done)
    mean_busy_s = statistics.fmean(run.busy_s)
    return {
        "num_completed": len(done),
        "num_failed": len(run.requests) - len(done),
        "virtual_s": run.end_s,
        "output_tokens_per_s": output_tokens / run.end_s if run.end_s else 0.0,
        "hit_rate": sum(request.num_cached_tokens for request in done) / max(1, prompt_tokens),
        "load_skew": max(run.busy_s) / mean_busy_s if mean_busy_s else 1.0,
        "utilisation": mean_busy_s / run.end_s if run.end_s else 0.0,
        "kv_elsewhere_bytes": bytes_per_token
        * sum(request.num_elsewhere_tokens for request in done),
        "num_preemptions": sum(request.num_preemptions for request in done),
        "num_steps": run.num_steps,
        **_percentiles("ttft_ms", ttft_ms),
        **_percentiles("e2el_ms", e2el_ms),
    }


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    """The value below which that many of a hundred lie, at the nearest rank."""
    ordered = sorted(values)
    return {
        f"p{p}_{name}": ordered[max(0, -(-p * len(ordered) // 100) - 1)] if ordered else 0.0
        for p in PERCENTILES
    }
