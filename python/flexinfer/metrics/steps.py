"""StepStats and EngineStats: what a step took and what mapping cost it. No torch."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from flexinfer.metrics.requests import STEP_TOKEN_BUCKETS, Histogram

if TYPE_CHECKING:
    from flexinfer.metrics.requests import RequestStats
    from flexinfer.metrics.speculation import SpeculationStats
    from flexinfer.vtensor import Stats, VTensorManager
    from flexinfer.vtensor.spec import Retention


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step. Times in microseconds."""

    step_us: float
    map_us_exposed: float
    """The step waited for mapping."""
    map_us_hidden: float
    """The worker mapped, created and scrubbed meanwhile."""
    rows_pre_extended: int
    """Rows (one chunk in each plane) that the worker mapped ahead of need."""
    num_requests: int
    num_tokens: int
    num_prefill_tokens: int
    num_preempted: int


@dataclass(slots=True)
class StepTotals:
    """Sums of all steps; microseconds."""

    num_steps: int = 0
    step_us: float = 0.0
    map_us_exposed: float = 0.0
    map_us_hidden: float = 0.0
    rows_pre_extended: int = 0
    num_tokens: int = 0
    num_prefill_tokens: int = 0
    num_preempted: int = 0

    def add(self, step: StepStats) -> None:
        self.num_steps += 1
        for item in fields(self)[1:]:
            setattr(self, item.name, getattr(self, item.name) + getattr(step, item.name))


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Numbers of an engine at this moment; counts are totals since the start."""

    num_running: int
    num_waiting: int
    num_swapped: int
    is_sleeping: bool
    preemptions: dict[str, dict[str, int]]
    """mode -> reason -> count."""
    num_prefix_waits: int
    """Times that a request was put off because its prefix was being computed by another."""
    num_promoted: int
    """Requests that became overdue: passed over as often as max_passed_over allows."""
    extension_depth_tokens: int
    """How far ahead of a decode memory is mapped now."""
    steps: StepTotals = field(default_factory=StepTotals)
    last_step: StepStats | None = None
    memory: Stats | None = None
    """Numbers of the manager: resident, shared, recorded bytes, chunks deduplicated, ..."""
    draft_memory: Stats | None = None
    """Those of the draft model's manager; None without one."""
    requests: RequestStats | None = None
    """Latencies and tokens of all requests; a copy."""
    step_tokens: Histogram | None = None
    """Tokens per step; a copy."""
    num_deferred: int = 0
    """Waiting requests whose prefix was being computed by another when last looked at."""
    capacity_tokens: int = 0
    """Tokens whose KV the budget holds."""
    kv_groups: tuple[Retention, ...] = ()
    """What the model's layers keep, and for how many tokens."""
    kv_state_bytes: int = 0
    """Physical bytes of the recurrent state of one sequence; 0: none is kept."""
    speculation: SpeculationStats | None = None
    """What was proposed ahead and what of it accepted; a copy. None without speculation."""

    def as_dict(self) -> dict[str, Any]:
        """All numbers as plain values, for JSON."""
        out = {item.name: getattr(self, item.name) for item in fields(self)}
        for name in ("steps", "last_step"):
            if (part := out[name]) is not None:
                out[name] = {item.name: getattr(part, item.name) for item in fields(part)}
        for name in ("memory", "draft_memory"):
            if out[name] is not None:
                out[name] = out[name].as_dict()
        if self.requests is not None:
            out["requests"] = self.requests.as_dict()
        if self.speculation is not None:
            out["speculation"] = self.speculation.as_dict()
        if self.step_tokens is not None:
            out["step_tokens"] = self.step_tokens.as_dict()
        return out


class StepMeter:
    """Measures steps: `start()`, the step, `stop(...)`."""

    def __init__(self, manager: VTensorManager) -> None:
        self._manager = manager
        self.totals = StepTotals()
        self.tokens = Histogram(STEP_TOKEN_BUCKETS)
        """Of each step."""
        self.last: StepStats | None = None
        self._mapping = manager.mapping_times()
        self._start_s = time.perf_counter()

    def start(self) -> None:
        self._start_s = time.perf_counter()

    def stop(
        self,
        *,
        num_requests: int,
        num_tokens: int,
        num_prefill_tokens: int = 0,
        num_preempted: int = 0,
    ) -> StepStats:
        """Mapping since the last stop counts: the worker's work may end between two steps."""
        before, now = self._mapping, self._manager.mapping_times()
        self._mapping = now
        step = StepStats(
            step_us=(time.perf_counter() - self._start_s) * 1e6,
            map_us_exposed=now.exposed_us - before.exposed_us,
            map_us_hidden=now.hidden_us - before.hidden_us,
            rows_pre_extended=now.pre_extended_rows - before.pre_extended_rows,
            num_requests=num_requests,
            num_tokens=num_tokens,
            num_prefill_tokens=num_prefill_tokens,
            num_preempted=num_preempted,
        )
        self.last = step
        self.totals.add(step)
        self.tokens.observe(num_tokens)
        return step
