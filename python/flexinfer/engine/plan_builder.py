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
    Invariant: the executor knows the sequences of `_requests`, and no others; of those that only
    failed plans have named (`_unconfirmed`) it may know some.
    """

    def __init__(self, executor: Executor, find_shared: FindShared) -> None:
        """find_shared: `VTensorManager.shared_ranges`."""
        self._executor = executor
        self._find_shared = find_shared if executor.uses_shared_ranges else None
        self._requests: dict[int, Request] = {}  # by sampling id
        self._unconfirmed: set[int] = set()
        self._last: StepPlan | None = None

    def build(self, items: Sequence[ScheduledRequest]) -> StepPlan:
        """The batch of `items`, one-token items first. REQUIRES: they have vTensors."""
        has_adapters = any(item.request.adapter for item in items)
        if has_adapters:  # side by side, so that there is one product for all of their rows
            items = sorted(items, key=lambda item: item.request.adapter)
        decodes = [item for item in items if item.end - item.start == 1]
        prefills = [item for item in items if item.end - item.start > 1]
        items = decodes + prefills
        token_ids = array("i", [known_token(item) for item in decodes])
        for item in prefills:
            token_ids += item.request.token_array[item.start : item.end]
            token_ids.extend(item.draft)
        rows: list[int] = []
        sampling: list[Request] = []
        lengths: list[int] = []
        scored: list[ScoredRows] = []
        scoring: list[Request] = []
        end_row = 0
        for item in items:
            request, end = item.request, item.end
            row, end_row = end_row, end_row + end - item.start
            if request.params.prompt_logprobs is not None:
                scored += _scored_rows(item, row)
                scoring.append(request)
            if item.samples:
                for sequence in (request, *request.siblings) if request.siblings else (request,):
                    for back in range(len(item.draft), -1, -1):
                        sampling.append(sequence)
                        rows.append(end_row - 1 - back)
                        lengths.append(end - back)
        starts = [item.start for item in items]
        self._last = StepPlan(
            token_ids=token_ids.tobytes(),
            slots=tuple([item.vtensor.slot for item in items]),
            starts=tuple(starts),
            ends=tuple([item.end for item in items]),
            num_decodes=len(decodes),
            sampled_rows=tuple(rows),
            sampling_ids=tuple([request.sampling_id for request in sampling]),
            sampled_lengths=tuple(lengths),
            scored=tuple(scored),
            new_sequences=self._introduce(sampling + scoring),
            fed=self._fed(decodes),
            states=tuple([slots for item in items if (slots := item.request.state_slots)]),
            adapters=tuple([item.request.adapter for item in items]) if has_adapters else (),
            shared=tuple(self._shared(items, starts)),
        )
        return self._last

    def confirm(self, plan: StepPlan) -> None:
        """The plan was executed: later ones need not introduce its sequences again."""
        self._unconfirmed.difference_update(setup.sampling_id for setup in plan.new_sequences)

    def match(self, result: StepResult) -> list[tuple[Request, SampledToken]]:
        """Whose the tokens are."""
        return [(self._requests[token.sampling_id], token) for token in result.tokens]

    def match_failures(self, result: StepResult) -> list[tuple[Request, str]]:
        """What failed, and why."""
        return [(self._requests[f.sampling_id], f.message) for f in result.failures]

    def forget(self, ended: Iterable[Request]) -> None:
        """These requests will be in no plan any more."""
        known = [r.sampling_id for r in ended if self._requests.pop(r.sampling_id, None)]
        self._unconfirmed.difference_update(known)
        if known:
            self._executor.forget(known)

    def _introduce(self, requests: Sequence[Request]) -> tuple[SequenceSetup, ...]:
        known, unconfirmed = self._requests, self._unconfirmed
        new = [r for r in requests if r.sampling_id not in known or r.sampling_id in unconfirmed]
        if not new:
            return ()
        known.update((request.sampling_id, request) for request in new)
        unconfirmed.update(request.sampling_id for request in new)
        return tuple([_setup(request) for request in dict.fromkeys(new)])

    def _fed(self, decodes: Sequence[ScheduledRequest]) -> tuple[tuple[int, int], ...]:
        """Which rows take a token that the last plan samples."""
        rows = [row for row, item in enumerate(decodes) if item.start == item.request.num_tokens]
        if not rows:
            return ()
        assert self._last is not None
        index = {sampling_id: i for i, sampling_id in enumerate(self._last.sampling_ids)}
        return tuple([(row, index[decodes[row].request.sampling_id]) for row in rows])

    def _shared(
        self, items: Sequence[ScheduledRequest], starts: Sequence[int]
    ) -> Sequence[TokenRange]:
        if self._find_shared is None:
            return ()
        return self._find_shared([item.vtensor for item in items], starts)


def known_token(item: ScheduledRequest) -> int:
    """The first token of an item; 0 while it is being sampled."""
    token_ids = item.request.token_ids
    return token_ids[item.start] if item.start < len(token_ids) else 0


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
