"""StepPipeline: computes steps one after the other, or each while the one before it runs. No torch.

    not asynchronous   schedule 1 | compute 1 | outputs 1 | schedule 2 | compute 2 | ...
    asynchronous       schedule 1 | launch 1 | schedule 2 | launch 2 | outputs 1 | schedule 3 | ...
                                    device:    1 .................... 2 ......................

Step 2 is scheduled and has its memory before the tokens of step 1 are known: the device puts them
where step 2 computes them (`StepPlan.fed`). A request that turns out to have ended with step 1 is
computed once more, in vain. A step that somebody's next token depends on is waited for instead
(`needs_result`), and so is one after which memory would have to be taken from a request.

Source: the paper's split of scheduling and execution, and SGLang's and vLLM's schedulers. Not
thread-safe.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flexinfer.runner.plan import StepResult
from flexinfer.sampling.sequences import reads_output
from flexinfer.scheduler.batch import Batch
from flexinfer.scheduler.request import Request

if TYPE_CHECKING:
    from flexinfer.config import EngineConfig
    from flexinfer.engine.isolation import Failure
    from flexinfer.engine.step_execution import StepExecution
    from flexinfer.runner.executor import PendingResult

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose result is not known."""

    batch: Batch
    pending: PendingResult


class StepPipeline:
    """
    Invariant: between two calls at most one step is in flight, the next one.
    """

    def __init__(self, execution: StepExecution, config: EngineConfig) -> None:
        self._is_asynchronous = bool(config.async_scheduling)
        self.execution = execution
        self._scheduler = execution.scheduler
        self._next: LaunchedStep | None = None

    @property
    def launched(self) -> Batch | None:
        """The next step, if it is in flight."""
        return None if self._next is None else self._next.batch

    def execute(
        self, batch: Batch, *, may_run_ahead: bool = True
    ) -> tuple[StepResult, list[Failure]]:
        """The result of this batch, and what of it failed. REQUIRES: it is the one `launched`, if
        there is one."""
        step, self._next = self._next, None
        if step is None and not self._is_asynchronous:
            self._scheduler.pre_extend(batch)
            return self.execution.execute(batch)
        later = None
        try:
            step = step or self._launch(batch)
            if may_run_ahead and not any(needs_result(item.request) for item in batch.items):
                later = self._launch_next()
            result = step.pending.result()
        except Exception:
            logger.warning("an asynchronous step has failed: it is computed again", exc_info=True)
            self._drop(batch, later)
            return self.execution.execute(batch) if batch.items else (StepResult([]), [])
        self._next = later
        return result, []

    def _launch(self, batch: Batch) -> LaunchedStep:
        self._scheduler.pre_extend(batch)
        pending = self.execution.submit(batch.items)
        self._scheduler.launch(batch)
        return LaunchedStep(batch, pending)

    def _launch_next(self) -> LaunchedStep | None:
        """None if nothing can be computed before the result of the last launch is known."""
        batch = self._scheduler.schedule_ahead()
        return self._launch(batch) if batch.items else None

    def _drop(self, batch: Batch, later: LaunchedStep | None) -> None:
        """Neither has been computed; both may be, without what has ended meanwhile."""
        if later is not None:
            try:
                later.pending.result()
            except Exception:
                logger.debug("the step after it has failed too", exc_info=True)
            self._scheduler.drop(later.batch)
        self._scheduler.drop(batch)
        batch.items = [item for item in batch.items if not item.request.is_finished]


def needs_result(request: Request) -> bool:
    """Whether what follows this request's next token depends on more than that there is one."""
    params = request.params
    return (
        bool(request.siblings)
        or params.logprobs is not None
        or params.prompt_logprobs is not None
        or reads_output(params)
    )
