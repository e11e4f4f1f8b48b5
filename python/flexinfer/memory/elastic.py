"""ElasticMemory: the KV memory of a serving engine grows, shrinks, sleeps and wakes. No torch.

All of it happens between steps, in the caller's thread. Not thread-safe.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from flexinfer.errors import OutOfMemoryError
from flexinfer.memory.budget import format_bytes
from flexinfer.runtime.json_options import require_choice

if TYPE_CHECKING:
    from flexinfer.scheduler.scheduler import Scheduler
    from flexinfer.vtensor import VTensorManager

logger = logging.getLogger(__name__)

KV_CACHE = "kv_cache"
PARTS = ("weights", KV_CACHE, "scheduling")
"""Of an engine that sleeps, in vLLM. Here weights stay, and so does what is scheduled."""


@dataclass(frozen=True, slots=True)
class BudgetChange:
    """What `set_budget` did."""

    old_bytes: int
    new_bytes: int
    returned_bytes: int
    """Physical memory that went back to the system."""
    num_preempted: int
    seconds: float

    def __add__(self, other: BudgetChange) -> BudgetChange:
        """Of two managers, one after the other."""
        mine, others = astuple(self), astuple(other)
        return BudgetChange(*[a + b for a, b in zip(mine, others, strict=True)])


class ElasticMemory:
    """Changes of the budget, and sleep."""

    def __init__(
        self, scheduler: Scheduler, manager: VTensorManager, directory: str | None = None
    ) -> None:
        self._scheduler = scheduler
        self._manager = manager
        self._directory = directory
        self._budget_asleep = 0

    @property
    def budget_bytes(self) -> int:
        """The budget, asleep or not."""
        return self._budget_asleep if self._manager.asleep else self._manager.memory_budget

    def set_budget(self, size: int | str) -> BudgetChange:
        """Up: at once. Down: evicts recorded prefixes, gives free chunks back, has pins give way
        (pins.py), and preempts, the lowest priority and latest first, until the rest fits; the
        memory is back when it returns.

        Time down, the `seconds` of the result: at most 0.1 s for each GiB given back, and 3 s for
        each GiB that has to be swapped out (docs/design.md, "Elastic": what was measured).

        Raises ValueError if some unfinished request could never end within it, and
        OutOfMemoryError, with nothing changed, if preemption is off and more than that is in use.
        If prefixes pinned by the manager's owner hold too much it raises OutOfMemoryError as well;
        requests that were preempted on the way go on later.
        """
        from flexinfer.vtensor import parse_bytes

        budget = parse_bytes(size, "KV cache memory")
        self._check_requests(budget)
        old_bytes = self._manager.memory_budget
        resident_bytes = self._manager.stats().resident_bytes
        start_s = time.perf_counter()
        num_preempted = self._shrink(budget)
        change = BudgetChange(
            old_bytes=old_bytes,
            new_bytes=self._manager.memory_budget,
            returned_bytes=max(0, resident_bytes - self._manager.stats().resident_bytes),
            num_preempted=num_preempted,
            seconds=time.perf_counter() - start_s,
        )
        logger.info("KV cache memory changed: %s", change)
        return change

    def _shrink(self, budget: int) -> int:
        """Returns how many requests were preempted."""
        scheduler = self._scheduler
        num_preempted = 0
        while (error := self._try_budget(budget)) is not None:
            if scheduler.pins.release_oldest():
                continue
            if not (scheduler.preemption.is_on and scheduler.running):
                raise self._explain(error)
            scheduler.preempt(scheduler.choose_victim(), "budget lowered")
            num_preempted += 1
        return num_preempted

    def _try_budget(self, budget: int) -> OutOfMemoryError | None:
        try:
            self._manager.memory_budget = budget
        except OutOfMemoryError as error:
            return error
        return None

    def _explain(self, error: OutOfMemoryError) -> OutOfMemoryError:
        """The same error, with what the scheduler knows."""
        num_running = len(self._scheduler.running)
        cause = "pinned prefixes hold the rest"
        if num_running:
            cause = f"{num_running} requests run and preemption is off: let them end or abort them"
        explained = OutOfMemoryError(f"{error}; {cause}")
        vars(explained).update(vars(error))
        return explained

    def _check_requests(self, budget: int) -> None:
        """No unfinished request may be left that can never fit."""
        needed = self._scheduler.admission.most_bytes
        largest = max(self._scheduler.requests, key=needed, default=None)
        if largest is not None and needed(largest) > budget:
            raise ValueError(
                f"{budget} bytes of KV cache memory for the model are too little for request "
                f"{largest.request_id!r}, which may need {needed(largest)} bytes "
                f"({largest.max_num_tokens - 1} tokens): let it end or abort it first"
            )

    def sleep(self, level: int) -> int:
        """Give all physical KV back; returns bytes. Unfinished requests keep their state.

        Level 1 saves recorded prefixes too, level 2 forgets those that are not pinned.
        """
        if level not in (1, 2) or isinstance(level, bool):
            raise ValueError(f"sleep level must be 1 or 2, got {level!r}")
        if self._manager.asleep:
            return 0
        self._budget_asleep = self._manager.memory_budget
        if level == 2:
            self._manager.reset_prefix_cache()
        start_s = time.perf_counter()
        num_bytes = self._manager.sleep(self._directory)
        seconds = time.perf_counter() - start_s
        logger.info("asleep: %s given back in %.3f s", format_bytes(num_bytes), seconds)
        return num_bytes

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Undo `sleep`. Raises OutOfMemoryError, still asleep, when memory is short.

        tags: which of vLLM's parts (`PARTS`); without "kv_cache", the one that sleeps, nothing is
        done. Raises ValueError for others.
        """
        if tags is not None and KV_CACHE not in _parts(tags):
            return
        start_s = time.perf_counter()
        self._manager.wake()
        self._scheduler.release_ended()
        self._scheduler.pins.wake_up()
        logger.info("awake after %.3f s", time.perf_counter() - start_s)


def _parts(tags: Iterable[str]) -> list[str]:
    parts = [tags] if isinstance(tags, str) else list(tags)
    for part in parts:
        require_choice("each of tags", part, PARTS)
    return parts
