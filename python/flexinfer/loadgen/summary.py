"""Summary: what a load took, with the names and units of `vllm bench serve`'s result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flexinfer.loadgen.request import Outcome

METRICS = {
    "ttft": "Time to first token",
    "tpot": "Time per output token (excluding the first)",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}
"""Name -> title. Values in milliseconds."""
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
MS = 1e3


@dataclass(frozen=True)
class Distribution:
    """Of values in milliseconds."""

    mean: float
    median: float
    std: float
    percentiles: dict[float, float]


@dataclass(frozen=True)
class Summary:
    """Of the requests that succeeded; `goodput`: None unless it was asked for."""

    duration_s: float
    num_completed: int
    num_failed: int
    total_input_tokens: int
    total_output_tokens: int
    max_concurrent_requests: int
    max_issue_delay_s: float
    goodput: float | None
    latencies: dict[str, Distribution]
    """By the names in METRICS; one that has no values is not there."""

    @property
    def request_throughput(self) -> float:
        return self.num_completed / self.duration_s

    @property
    def output_throughput(self) -> float:
        return self.total_output_tokens / self.duration_s

    @property
    def total_token_throughput(self) -> float:
        return (self.total_input_tokens + self.total_output_tokens) / self.duration_s

    def as_dict(self) -> dict[str, Any]:
        """Flat, as vLLM writes it."""
        out: dict[str, Any] = {
            "duration": self.duration_s,
            "completed": self.num_completed,
            "failed": self.num_failed,
            "total_input_tokens": self.total_input_tokens,
            "total_output_tokens": self.total_output_tokens,
            "request_throughput": self.request_throughput,
            "output_throughput": self.output_throughput,
            "total_token_throughput": self.total_token_throughput,
            "max_concurrent_requests": self.max_concurrent_requests,
            "max_issue_delay_ms": self.max_issue_delay_s * MS,
        }
        if self.goodput is not None:
            out["request_goodput"] = self.goodput
        for name, values in self.latencies.items():
            out[f"mean_{name}_ms"] = values.mean
            out[f"median_{name}_ms"] = values.median
            out[f"std_{name}_ms"] = values.std
            for percentile, value in values.percentiles.items():
                out[f"p{percentile:g}_{name}_ms"] = value
        return out


def summarize(
    outcomes: Sequence[Outcome],
    duration_s: float,
    percentiles: Sequence[float] = (99.0,),
    goodput: Mapping[str, float] | None = None,
) -> Summary:
    """`goodput`: metric -> milliseconds that a good request stays within."""
    good = [outcome for outcome in outcomes if outcome.is_success]
    latencies = {
        name: _distribution(values, percentiles)
        for name in METRICS
        if (values := [value for outcome in good for value in values_ms(outcome, name)])
    }
    return Summary(
        duration_s=duration_s,
        num_completed=len(good),
        num_failed=len(outcomes) - len(good),
        total_input_tokens=sum(outcome.num_prompt_tokens for outcome in good),
        total_output_tokens=sum(outcome.num_output_tokens for outcome in good),
        max_concurrent_requests=_max_concurrent(outcomes),
        max_issue_delay_s=max((outcome.issue_delay_s for outcome in outcomes), default=0.0),
        goodput=None
        if goodput is None
        else sum(_is_good(outcome, goodput) for outcome in good) / duration_s,
        latencies=latencies,
    )


def values_ms(outcome: Outcome, metric: str) -> list[float]:
    """What one request adds to a metric: a value, none, or for "itl" several."""
    if metric == "itl":
        return [gap * MS for gap in outcome.inter_token_s]
    value = {
        "ttft": outcome.first_token_s,
        "tpot": outcome.per_output_token_s,
        "e2el": outcome.latency_s,
    }[metric]
    return [] if value is None else [value * MS]


def parse_goodput(items: Sequence[str]) -> dict[str, float]:
    """ "ttft:500" -> {"ttft": 500.0}. Raises ValueError."""
    limits = {}
    for item in (part for text in items for part in text.replace(",", " ").split()):
        name, colon, text = item.partition(":")
        if not colon or name not in GOODPUT_METRICS:
            known = ", ".join(f"{metric}:MS" for metric in GOODPUT_METRICS)
            raise ValueError(f"--goodput takes {known}, got {item!r}")
        try:
            limits[name] = float(text)
        except ValueError:
            raise ValueError(f"--goodput {item!r}: {text!r} is not a number") from None
        if not limits[name] > 0:
            raise ValueError(f"--goodput {item!r}: milliseconds must be positive")
    return limits


def _is_good(outcome: Outcome, limits: Mapping[str, float]) -> bool:
    """A request of one token has no time per output token, and so none that is too long."""
    return all(
        value <= limit for name, limit in limits.items() for value in values_ms(outcome, name)
    )


def _distribution(values: Sequence[float], percentiles: Sequence[float]) -> Distribution:
    import numpy as np

    array = np.asarray(values, dtype=np.float64)
    return Distribution(
        mean=float(array.mean()),
        median=float(np.median(array)),
        std=float(array.std()),
        percentiles={p: float(np.percentile(array, p)) for p in percentiles},
    )


def _max_concurrent(outcomes: Sequence[Outcome]) -> int:
    """The most requests that ran at one moment; one that ends as another starts does not count."""
    changes = [(outcome.start_s, 1) for outcome in outcomes]
    changes += [(outcome.start_s + outcome.latency_s, -1) for outcome in outcomes]
    running = most = 0
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return most
