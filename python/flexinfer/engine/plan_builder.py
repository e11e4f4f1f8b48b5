"""PlanBuilder: from scheduled requests to the plan of a step, and from its result back to them.

The only place that knows both requests and sampling ids. No torch. Not thread-safe.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from flexinfer.runner.plan import SampledToken, ScoredRows, StepPlan, StepResult
from flexinfer.sampling.sequences import SequenceSetup, reads_output, reads_prompt
from flexinfer.scheduler.batch import ScheduledRequest
from flexinfer.scheduler.request import Request

if TYPE_CHECKING:
    from flexinfer.runner.executor import Executor
    from flexinfer.runner.plan import TokenRange
    from flexinfer.vtensor import VTensor

FindShared = Callable[[Sequence["VTensor"], Sequence[int]], "list[TokenRange]"]


class PlanBuilder:
    """
    Invariant: the executor knows the sequences of `_requests`, and no others.
    """

    def __init__(self, executor: Executor, find_shared: FindShared) -> None:
        """find_shared: `VTensorManager.shared_ranges`."""
        self._executor = executor
        self._find_shared = find_shared if executor.uses_shared_ranges else None
        self._requests: dict[int, Request] = {}  # by sampling id

    def build(self, items: Sequence[ScheduledRequest]) -> StepPlan:
        """The batch of `items`, one-token items first. REQUIRES: they have vTensors."""
        items = sorted(items, key=lambda item: item.num_tokens > 1)
        num_decodes = sum(item.num_tokens == 1 for item in items)
        decodes = items[:num_decodes]
        token_ids = array("i", [item.request.token_ids[item.start] for item in decodes])
        for item in items[num_decodes:]:
            token_ids += item.request.token_array[item.start : item.end]
        rows: list[int] = []
        sampling: list[Request] = []
        lengths: list[int] = []
        scored: list[ScoredRows] = []
        scoring: list[Request] = []
        row = 0
        for item in items:
            request = item.request
            if request.params.prompt_logprobs is not None:
                scored += _scored_rows(item, row)
                scoring.append(request)
            row += item.num_tokens
            if item.samples:
                sequences = (request, *request.siblings)
                sampling += sequences
                rows += [row - 1] * len(sequences)
                lengths += [item.end] * len(sequences)
        starts = [item.start for item in items]
        return StepPlan(
            token_ids=token_ids.tobytes(),
            slots=tuple([item.vtensor.slot for item in items]),
            starts=tuple(starts),
            ends=tuple([item.end for item in items]),
            num_decodes=num_decodes,
            sampled_rows=tuple(rows),
            sampling_ids=tuple([request.sampling_id for request in sampling]),
            sampled_lengths=tuple(lengths),
            scored=tuple(scored),
            new_sequences=self._introduce(sampling + scoring),
            shared=tuple(self._shared(items, starts)),
        )

    def match(self, result: StepResult) -> list[tuple[Request, SampledToken]]:
        """Whose the tokens are."""
        return [(self._requests[token.sampling_id], token) for token in result.tokens]

    def match_failures(self, result: StepResult) -> list[tuple[Request, str]]:
        """What failed, and why."""
        return [(self._requests[f.sampling_id], f.message) for f in result.failures]

    def forget(self, ended: Iterable[Request]) -> None:
        """These requests will be in no plan any more."""
        known = [r.sampling_id for r in ended if self._requests.pop(r.sampling_id, None)]
        if known:
            self._executor.forget(known)

    def _introduce(self, requests: Sequence[Request]) -> tuple[SequenceSetup, ...]:
        new = {r.sampling_id: r for r in requests if r.sampling_id not in self._requests}
        self._requests.update(new)
        return tuple([_setup(request) for request in new.values()])

    def _shared(
        self, items: Sequence[ScheduledRequest], starts: Sequence[int]
    ) -> Sequence[TokenRange]:
        if self._find_shared is None:
            return ()
        return self._find_shared([item.vtensor for item in items], starts)


def _setup(request: Request) -> SequenceSetup:
    params = request.params
    return SequenceSetup(
        sampling_id=request.sampling_id,
        params=params,
        num_prompt_tokens=len(request.prompt_token_ids),
        prompt_token_ids=tuple(request.prompt_token_ids) if reads_prompt(params) else (),
        output_token_ids=tuple(request.output_token_ids) if reads_output(params) else (),
        stop_token_ids=request.stop_token_ids if params.min_tokens else frozenset(),
    )


def _scored_rows(item: ScheduledRequest, row: int) -> list[ScoredRows]:
    """The prompt positions of an item that are scored in this step; `row`: its first one's."""
    request = item.request
    start = max(item.start, request.num_scored_tokens)
    end = min(item.end, len(request.prompt_token_ids) - 1)
    if start >= end:
        return []
    return [ScoredRows(request.sampling_id, row + start - item.start, start, end)]
