"""Sample: one scrape of a server's /metrics, and what happened between two of them.

Works with any server whose names are ours; numbers it does not have are 0.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

PREFIX = "flexinfer:"
LATENCIES = {
    "time_to_first_token": "time_to_first_token_seconds",
    "inter_token": "inter_token_latency_seconds",
    "end_to_end": "e2e_request_latency_seconds",
    "queue": "request_queue_time_seconds",
}
MEMORY = (
    *("reserved", "mapped", "resident", "shared", "saved", "recorded"),
    *("free", "parked", "swapped", "budget"),
)
START = "process_start_time_seconds"
SOURCE = frozenset({"model_name", "engine", "replica"})
"""Labels that say whose number it is; the others say of what."""
QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Sample:
    """Values by name, summed over labels; histograms as cumulative counts by upper bound."""

    time_s: float
    model: str = ""
    values: dict[str, float] = field(default_factory=dict)
    labelled: dict[tuple[str, str], float] = field(default_factory=dict)
    """(name, value of the one label besides those of SOURCE) -> value."""
    buckets: dict[str, dict[float, float]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, time_s: float) -> Sample:
        """From the text of /metrics. Raises ValueError for what is not of FlexInfer."""
        from prometheus_client.parser import text_string_to_metric_families

        values: defaultdict[str, float] = defaultdict(float)
        labelled: defaultdict[tuple[str, str], float] = defaultdict(float)
        buckets: defaultdict[str, defaultdict[float, float]]
        buckets = defaultdict(lambda: defaultdict(float))
        model = ""
        for family in text_string_to_metric_families(text):
            for item in family.samples:
                name = item.name.removeprefix(PREFIX)
                if name == item.name and name != START:
                    continue
                model = item.labels.get("model_name", model)
                if name.endswith("_bucket"):
                    bound = float(item.labels["le"])
                    buckets[name.removesuffix("_bucket")][bound] += item.value
                    continue
                values[name] += item.value
                others = [v for k, v in item.labels.items() if k not in SOURCE]
                if len(others) == 1:
                    labelled[name, others[0]] += item.value
        if "engine_up" not in values:
            raise ValueError("these are no metrics of flexinfer serve: flexinfer:engine_up lacks")
        plain = {name: dict(counts) for name, counts in buckets.items()}
        return cls(time_s, model, dict(values), dict(labelled), plain)

    def numbers(self, before: Sample | None) -> dict[str, Any]:
        """What the view shows. Rates, shares and quantiles are of the time since `before`; without
        it, of all the time that the server has run."""
        since = _Difference(self, before)
        steps = since.total("engine_steps_total")
        exposed_s = since.labelled("mapping_time_seconds_total", "exposed")
        hidden_s = since.labelled("mapping_time_seconds_total", "hidden")
        return {
            "time": self.time_s,
            "model": self.model,
            "up": bool(self.values.get("engine_up")),
            "sleeping": bool(self.values.get("engine_sleeping")),
            "requests": {
                kind: int(self.values.get(f"num_requests_{kind}", 0))
                for kind in ("running", "waiting", "swapped")
            },
            "requests_ended": int(since.total("request_success_total")),
            "preemptions": int(since.total("num_preemptions_total")),
            "prompt_tokens_per_s": since.rate("prompt_tokens_total"),
            "generation_tokens_per_s": since.rate("generation_tokens_total"),
            "prefix_hit_rate": since.share("prefix_cache_hits_total", "prefix_cache_queries_total"),
            "kv_cache_usage": self.values.get("kv_cache_usage_perc", 0.0),
            "acceptance_rate": since.share(
                "spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total"
            ),
            "memory_bytes": {
                kind: int(self.values.get(f"kv_cache_{kind}_bytes", 0)) for kind in MEMORY
            },
            "exposed_us_per_step": exposed_s * 1e6 / steps if steps else 0.0,
            "hidden_us_per_step": hidden_s * 1e6 / steps if steps else 0.0,
            "driver_calls": int(since.total("driver_calls_total")),
            "latency_s": {
                name: {f"p{q * 100:g}": since.quantile(histogram, q) for q in QUANTILES}
                for name, histogram in LATENCIES.items()
            },
        }


class _Difference:
    """Counters of one sample minus those of an earlier one; a restart begins from 0."""

    def __init__(self, now: Sample, before: Sample | None) -> None:
        if before is not None and _num_steps(before) > _num_steps(now):
            before = None
        self._now = now
        self._before = before or Sample(now.values.get(START, math.nan))

    def total(self, name: str) -> float:
        return self._now.values.get(name, 0.0) - self._before.values.get(name, 0.0)

    def labelled(self, name: str, label: str) -> float:
        key = (name, label)
        return self._now.labelled.get(key, 0.0) - self._before.labelled.get(key, 0.0)

    def rate(self, name: str) -> float:
        """A second; 0 where the time is not known."""
        seconds = self._now.time_s - self._before.time_s
        return self.total(name) / seconds if seconds > 0 else 0.0

    def share(self, part: str, whole: str) -> float | None:
        of = self.total(whole)
        return self.total(part) / of if of else None

    def quantile(self, name: str, quantile: float) -> float | None:
        """As PromQL's histogram_quantile: linear within a bucket; None without values."""
        earlier = self._before.buckets.get(name, {})
        counts = [
            (bound, count - earlier.get(bound, 0.0))
            for bound, count in sorted(self._now.buckets.get(name, {}).items())
        ]
        return quantile_of(counts, quantile)


def quantile_of(cumulative: list[tuple[float, float]], quantile: float) -> float | None:
    """The quantile of cumulative counts by upper bound, the last bound infinite."""
    if not cumulative or cumulative[-1][1] <= 0:
        return None
    rank = quantile * cumulative[-1][1]
    low_bound, low_count = 0.0, 0.0
    for bound, count in cumulative:
        if count >= rank and count > low_count:
            if math.isinf(bound):
                return low_bound
            return low_bound + (bound - low_bound) * (rank - low_count) / (count - low_count)
        low_bound, low_count = bound, count
    return low_bound


def _num_steps(sample: Sample) -> float:
    return sample.values.get("engine_steps_total", 0.0)
