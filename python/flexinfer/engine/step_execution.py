"""StepExecution: computes a batch, and does all that can be done before it is given up. No torch.

While a GPU has no memory for the activations, with less in the way; if the model fails, in parts
(isolation.py). What a failed attempt has written is written again, to the same places.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flexinfer.engine.isolation import Failure, execute_in_parts
from flexinfer.errors import EngineDeadError, OutOfMemoryError
from flexinfer.runner.plan import StepResult
from flexinfer.runtime.panics import panics_as_errors
from flexinfer.scheduler.batch import Batch, ScheduledRequest

if TYPE_CHECKING:
    from flexinfer.engine.build import EngineParts
    from flexinfer.engine.plan_builder import PlanBuilder
    from flexinfer.runner.executor import PendingResult

logger = logging.getLogger(__name__)

ACTIVATION_BYTES = 256 << 20
"""What the KV pool gives up at a time while a step's activations find no memory."""


class StepExecution:
    """Not thread-safe: one step at a time."""

    def __init__(self, parts: EngineParts, plans: PlanBuilder) -> None:
        self.scheduler = parts.scheduler
        self._plans = plans
        self._executor = parts.executor
        self.epoch = parts.epoch
        self._torch_memory = parts.torch_memory

    def submit(self, items: Sequence[ScheduledRequest]) -> PendingResult:
        """Launch the batch of `items`, without waiting for it."""
        plan = self._plans.build(items)
        with self.epoch:
            pending = self._executor.submit(plan)
        self._plans.confirm(plan)
        return pending

    def execute(self, batch: Batch) -> tuple[StepResult, list[Failure]]:
        """Compute the batch, and wait for the result: first as it is, then without what the KV pool
        can spare, then with fewer requests. Raises the model's last error if it can compute none,
        OutOfMemoryError when nothing is left to give.
        """
        is_first = True
        while True:
            try:
                return self._attempt(batch.items), []
            except EngineDeadError:
                raise
            except Exception as error:
                is_shortage = self._torch_memory.is_shortage(error)
                if not is_shortage and len(batch.items) == 1 and not batch.items[0].draft:
                    raise
                reason = f"{type(error).__name__}: {error}"
            # Here the error is gone, and with its traceback the tensors of the failed attempt.
            if not is_shortage:
                logger.warning("a step of %d requests has failed: %s", len(batch.items), reason)
                return execute_in_parts(self._attempt, batch.items, self._torch_memory.is_shortage)
            self._free_memory_for_activations(batch, reason, is_first=is_first)
            is_first = False

    def _attempt(self, items: Sequence[ScheduledRequest]) -> StepResult:
        plan = self._plans.build(items)
        with panics_as_errors, self.epoch:
            result = self._executor.execute(plan)
        self._plans.confirm(plan)
        return result

    def _free_memory_for_activations(self, batch: Batch, reason: str, *, is_first: bool) -> None:
        """Raises OutOfMemoryError when nothing is left to give."""
        given_bytes = self._torch_memory.give_to_torch(ACTIVATION_BYTES)
        if given_bytes > 0 or is_first:  # torch's observer may have given something before
            return
        if len(batch.items) < 2 or not self.scheduler.preemption.is_on:
            raise OutOfMemoryError(
                f"the GPU has no memory for the activations of {batch.num_tokens} tokens: lower "
                "max_num_batched_tokens, gpu_memory_utilization or kv_cache_memory_bytes "
                f"({reason})"
            )
        victim = self.scheduler.choose_victim([item.request for item in batch.items])
        self.scheduler.preempt(victim, "activations")
        batch.items = [item for item in batch.items if item.request is not victim]
        batch.preempted.append(victim)
