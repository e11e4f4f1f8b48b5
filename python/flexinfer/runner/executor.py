"""Executor: what computes the plans of an engine. No torch.

In this process that is the `ModelRunner`; the `TensorParallelExecutor` of several ranks hands each
of them the same plan, and gives back the result of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from flexinfer.runner.plan import StepPlan, StepResult


class PendingResult(Protocol):
    """The result of a step that is being computed."""

    def result(self) -> StepResult:
        """Waits for it."""
        ...


class Executor(Protocol):
    """Not thread-safe: one step at a time."""

    @property
    def uses_shared_ranges(self) -> bool:
        """Whether plans are to say which ranges of KV their segments share."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the planned tokens, their KV included, and sample. A plan whose execution failed
        may be executed again.

        REQUIRES: the planned tokens are backed by memory.
        """
        ...

    def submit(self, plan: StepPlan) -> PendingResult:
        """As `execute`, without waiting where the device works by itself. The next plan may be
        submitted before the result is asked for, and may name tokens of this one in `fed`."""
        ...

    def sync(self) -> None:
        """Return when all ranks have done what the manager was told."""
        ...

    def forget(self, sampling_ids: Sequence[int]) -> None:
        """These sequences have ended; ids that no plan has named are passed over."""
        ...
