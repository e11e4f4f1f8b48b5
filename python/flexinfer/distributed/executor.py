"""TensorParallelExecutor: computes a plan on all ranks; this one samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from flexinfer.distributed.messages import Step
from flexinfer.layers.exchanges import CollectiveError, Exchanges, StepFailedError, exchanges_of

if TYPE_CHECKING:
    import torch

    from flexinfer.distributed.operations import RecordingCore
    from flexinfer.distributed.ranks import Ranks
    from flexinfer.runner.model_runner import ModelRunner, PendingTokens
    from flexinfer.runner.plan import StepPlan, StepResult


class TensorParallelExecutor:
    """Rank 0's. Where the model fails on one rank, the step has failed on all of them, which are
    ready for the next.

    Not thread-safe: one step at a time.
    """

    def __init__(
        self,
        runner: ModelRunner,
        recording: RecordingCore,
        ranks: Ranks,
        *,
        timeout_s: float,
        check_interval: int,
    ) -> None:
        """timeout_s: for an answer of a rank. check_interval: steps between two comparisons of the
        ranks' books."""
        self._runner = runner
        self._recording = recording
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._check_interval = check_interval
        self._exchanges = exchanges_of(runner.loaded.model)
        self._num_steps = 0

    @property
    def uses_shared_ranges(self) -> bool:
        return self._runner.uses_shared_ranges

    def execute(self, plan: StepPlan) -> StepResult:
        """See `Executor.execute`. Raises RankError, StepFailedError where another rank failed."""
        return self.submit(plan).result()

    def submit(self, plan: StepPlan) -> PendingTokens:
        """See `Executor.submit`; waits for the model."""
        is_checked = self._num_steps % self._check_interval == 0
        self._num_steps += 1
        self._send(plan=_without_sampling(plan), is_checked=is_checked)
        try:
            logits = compute_part(self._runner, self._exchanges, plan)
        except CollectiveError as error:
            raise self._ranks.explain(error) from error
        except StepFailedError as error:
            message = self._ranks.wait_step_failed(error.rank, self._num_steps, self._timeout_s)
            raise StepFailedError(error.rank, message) from None
        return self._runner.begin_sampling(logits, plan)

    def forget(self, sampling_ids: Sequence[int]) -> None:
        self._runner.forget(sampling_ids)

    def sync(self) -> None:
        """Return when each rank has done what this one's manager was told. Raises RankError."""
        self._send(plan=None, is_checked=True)
        self._ranks.wait_done(self._timeout_s)

    def _send(self, plan: StepPlan | None, *, is_checked: bool) -> None:
        books = self._recording.books() if is_checked else None
        operations = self._recording.take()
        step = Step(self._num_steps, operations, plan, books, is_answered=plan is None)
        self._ranks.send(step)


def compute_part(runner: ModelRunner, exchanges: Exchanges, plan: StepPlan) -> torch.Tensor:
    """This rank's part of a step, on any rank: logits on rank 0. Where it raises anything but a
    CollectiveError, no rank waits for this one."""
    exchanges.begin()
    try:
        return runner.compute(plan)
    except (CollectiveError, StepFailedError):
        raise
    except Exception:
        exchanges.abandon(*runner.inputs.count_rows(plan))
        raise


def _without_sampling(plan: StepPlan) -> StepPlan:
    """What ranks that do not sample need of it."""
    return replace(plan, sampling_ids=(), sampled_lengths=(), new_sequences=())
