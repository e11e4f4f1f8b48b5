"""RequestStats: how long the requests of an engine took, as counts and histograms. No torch.

Kept by the engine's thread, a few additions per token; readers take a copy.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexinfer.outputs import RequestMetrics, RequestOutput

FIRST_TOKEN_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
LENGTH_BUCKETS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
"""Upper bounds, wide enough for a CPU and narrow enough for a GPU: vLLM's, and finer ones."""
SAMPLE_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)
STEP_TOKEN_BUCKETS = (1.0, *(float(2**power) for power in range(3, 15)))


class Histogram:
    """Counts of values by upper bounds, as Prometheus has them: value <= bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        """Not cumulative; the last one counts what is above all bounds."""
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[tuple[float, int]]:
        """(bound, how many values are at most that), the last bound infinite."""
        total, found = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            found.append((bound, total))
        return found

    def copy(self) -> Histogram:
        same = Histogram(self.bounds)
        same.counts, same.sum = list(self.counts), self.sum
        return same

    def as_dict(self) -> dict[str, Any]:
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.sum}


@dataclass(slots=True)
class RequestStats:
    """Totals since the start. A request is what a caller asked for, all its samples together."""

    prompt_tokens: int = 0
    """Of requests that got their first token."""
    generation_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    """finish_reason -> requests; of several samples the first one's."""
    first_token_s: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BUCKETS_S))
    """From arrival to the first token."""
    inter_token_s: Histogram = field(default_factory=lambda: Histogram(TOKEN_BUCKETS_S))
    """Between two steps that gave a sequence tokens: of an accepted proposal it gets several."""
    per_output_token_s: Histogram = field(default_factory=lambda: Histogram(TOKEN_BUCKETS_S))
    """Mean time of a token after the first, one value per request."""
    end_to_end_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_BUCKETS_S))
    queue_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_BUCKETS_S))
    """From arrival to the first step that computes it."""
    prefill_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_BUCKETS_S))
    """From that step to the first token."""
    decode_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_BUCKETS_S))
    """From the first token to the end."""
    request_prompt_tokens: Histogram = field(default_factory=lambda: Histogram(LENGTH_BUCKETS))
    request_generation_tokens: Histogram = field(default_factory=lambda: Histogram(LENGTH_BUCKETS))
    cached_prompt_tokens: int = 0
    """Of `prompt_tokens`, those whose KV was found recorded."""
    inference_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_BUCKETS_S))
    """From the first step to the end."""
    computed_prompt_tokens: Histogram = field(default_factory=lambda: Histogram(LENGTH_BUCKETS))
    """Prompt tokens that were not found recorded."""
    longest_sample_tokens: Histogram = field(default_factory=lambda: Histogram(LENGTH_BUCKETS))
    """Generated tokens of a request's longest sample."""
    asked_samples: Histogram = field(default_factory=lambda: Histogram(SAMPLE_BUCKETS))
    """n, or the beam width."""
    asked_tokens: Histogram = field(default_factory=lambda: Histogram(LENGTH_BUCKETS))
    """max_tokens, or what the context leaves where none is given."""

    def note_added(self, num_samples: int, max_tokens: int) -> None:
        """A request has been queued that asks for so much."""
        self.asked_samples.observe(num_samples)
        self.asked_tokens.observe(max_tokens)

    def note_tokens(
        self,
        metrics: RequestMetrics,
        num_prompt_tokens: int,
        num_tokens: int,
        now_s: float,
        num_cached_tokens: int = 0,
        num_each: int = 1,
    ) -> None:
        """A request's sequences got `num_tokens` in one step, `num_each` of them each. Sets the
        metrics' times."""
        if metrics.first_token_time is None:
            metrics.first_token_time = now_s
            self.prompt_tokens += num_prompt_tokens
            self.cached_prompt_tokens += num_cached_tokens
            self.first_token_s.observe(now_s - metrics.arrival_time)
        elif metrics.last_token_time is not None:
            self.inter_token_s.observe(now_s - metrics.last_token_time, num_tokens // num_each)
        metrics.last_token_time = now_s
        metrics.num_token_steps += num_each
        metrics.num_generated_tokens += num_tokens
        self.generation_tokens += num_tokens

    def note_end(self, output: RequestOutput, now_s: float, num_longest: int = 0) -> None:
        """A request has ended, whatever the reason; `output` is its last, and its longest sample
        has `num_longest` tokens."""
        metrics = output.metrics
        reason = output.outputs[0].finish_reason if output.outputs else None
        self.finished[reason or "abort"] += 1
        self.end_to_end_s.observe(now_s - metrics.arrival_time)
        self.request_prompt_tokens.observe(len(output.prompt_token_ids))
        self.request_generation_tokens.observe(metrics.num_generated_tokens)
        self.longest_sample_tokens.observe(num_longest)
        if metrics.first_scheduled_time is not None:
            self.queue_s.observe(metrics.first_scheduled_time - metrics.arrival_time)
            self.inference_s.observe(now_s - metrics.first_scheduled_time)
            num_computed = len(output.prompt_token_ids) - (output.num_cached_tokens or 0)
            self.computed_prompt_tokens.observe(num_computed)
        if metrics.first_scheduled_time is None or metrics.first_token_time is None:
            return
        self.prefill_s.observe(metrics.first_token_time - metrics.first_scheduled_time)
        self.decode_s.observe(now_s - metrics.first_token_time)
        num_steps = metrics.num_token_steps - 1
        if num_steps > 0 and metrics.last_token_time is not None:
            mean_s = (metrics.last_token_time - metrics.first_token_time) / num_steps
            self.per_output_token_s.observe(mean_s)

    def copy(self) -> RequestStats:
        same = RequestStats()
        for item in fields(self):
            value = getattr(self, item.name)
            setattr(same, item.name, value if isinstance(value, int) else value.copy())
        return same

    def as_dict(self) -> dict[str, Any]:
        """All numbers as plain values, for JSON."""
        out: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            out[item.name] = value.as_dict() if isinstance(value, Histogram) else value
        return {**out, "finished": dict(self.finished)}
