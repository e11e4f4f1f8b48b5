"""FakeStream: an executor that computes when it is asked for a result, as late as a GPU may."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from flexinfer import LLMEngine
from flexinfer.runner.plan import StepPlan, StepResult


@dataclass
class Queued:
    stream: FakeStream
    plan: StepPlan
    pending: Any = None
    error: Exception | None = None

    def result(self) -> StepResult:
        self.stream.run_until(self)
        if self.error is not None:
            raise self.error
        result: StepResult = self.pending.result()
        return result


class FakeStream:
    """What is submitted is computed in order, and none of it before somebody waits."""

    def __init__(self, engine: LLMEngine) -> None:
        self._submit = engine.runner.submit
        self._queue: deque[Queued] = deque()
        self.plans: list[StepPlan] = []
        self.most_queued = 0
        engine.runner.submit = self.submit  # type: ignore[assignment, method-assign]

    def submit(self, plan: StepPlan) -> Queued:
        self.plans.append(plan)
        self._queue.append(Queued(self, plan))
        self.most_queued = max(self.most_queued, len(self._queue))
        return self._queue[-1]

    def run_until(self, queued: Queued) -> None:
        while queued in self._queue:
            first = self._queue.popleft()
            try:
                first.pending = self._submit(first.plan)
            except Exception as error:
                first.error = error
