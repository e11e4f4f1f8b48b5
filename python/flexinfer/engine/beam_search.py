"""BeamSearch: the beam_width most probable continuations of a prompt, over forked vTensors.

Each running beam is a request. A step gives every beam its most probable next tokens; the best of
all of them make the next beams (PagedAttention, section 4.4: fork, append, free):

    parent has no child      its vTensor is released at once
    parent has one child     the child goes on in the parent's vTensor, nothing is forked
    parent has more          the others run on forks: whole chunks are shared, tails copied on write

Choice, finishing and stopping are those of transformers' `generate(num_beams=...)`, so that both
find the same sequences with the same scores. Beams are all of one length: one that has been
preempted keeps the others waiting, and these are suspended meanwhile, so that a group never holds
memory without going on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

from flexinfer.engine.group import NewToken, RequestGroup, sequence_ids
from flexinfer.errors import EngineError, RequestError
from flexinfer.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    Logprob,
    RequestOutput,
    TokenLogprobs,
)
from flexinfer.sampling.params import BeamSearchParams, SamplingParams
from flexinfer.scheduler.request import Request
from flexinfer.types import FinishReason

if TYPE_CHECKING:
    from flexinfer.sampling.logprobs import RowLogprobs
    from flexinfer.scheduler.scheduler import Scheduler


MAX_DIGITS = 290
"""Of what a score divides by; a float has 308."""


@dataclass(eq=False, slots=True)
class Beam:
    """A running sequence and how probable it is."""

    request: Request
    cum_logprob: float = 0.0
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A beam with one more token."""

    parent: Beam
    token_id: int
    cum_logprob: float
    logprob: Logprob

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        return [*self.parent.logprobs, {self.token_id: self.logprob}]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished sequence."""

    token_ids: list[int]
    """Generated ones."""
    cum_logprob: float
    score: float
    logprobs: list[TokenLogprobs]
    finish_reason: FinishReason


class BeamSearch(RequestGroup):
    """
    Invariants:
    1. all of `_beams` have the same number of tokens;
    2. `_rows` holds the next tokens of those beams that have been computed in this round.
    """

    def __init__(
        self, leader: Request, prompt: str | None, params: BeamSearchParams, tokenizer: Any | None
    ) -> None:
        width = params.beam_width
        super().__init__(leader, prompt, sequence_ids(leader.request_id, width))
        self.params = params
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset() if params.ignore_eos else leader.eos_token_ids
        self._max_new_tokens = leader.max_num_tokens - leader.num_tokens
        self._num_new_tokens = 0
        self._num_candidates = max(2, 1 + len(self._eos_token_ids)) * width
        leader.params = SamplingParams(
            temperature=0, logprobs=self._num_candidates, ignore_eos=True, max_tokens=None
        )
        leader.num_forks = width - 1
        leader.may_speculate = False
        self._beams = [Beam(leader)]
        self._free_ids = list(self.sequence_ids[1:])
        self._rows: dict[Request, RowLogprobs] = {}
        self._finished: list[Hypothesis] = []
        self._is_done = False

    @property
    def sequences(self) -> Sequence[Request]:
        return [beam.request for beam in self._beams]

    @property
    def is_finished(self) -> bool:
        return self._is_done or all(beam.request.is_finished for beam in self._beams)

    def update(self, sampled: Sequence[NewToken], scheduler: Scheduler) -> int:
        """Once all beams have their next tokens: choose the next beams."""
        for request, token in sampled:
            assert token.logprobs is not None
            self._rows[request] = token.logprobs
        if len(self._rows) < len(self._beams):
            for request, _ in sampled:
                scheduler.suspend(request)
            return len(sampled)
        candidates = self._best_candidates()
        self._rows.clear()
        self._num_new_tokens += 1
        self._finish_some(candidates[: self.params.beam_width])
        going_on = [c for c in candidates if not self._ends(c)][: self.params.beam_width]
        if self._stops(going_on):
            self._is_done = True
        else:
            self._continue(going_on, scheduler)
        return len(sampled)

    def end_with(self, failed: Request, scheduler: Scheduler) -> None:
        """Without one of its beams the search has no result."""
        scheduler.abort(self.unfinished(), failed.finish_reason or "error", failed.stop_message)

    def build(self) -> RequestOutput | None:
        """One output, at the end; after an error or abort with what has been found so far."""
        if not self.is_finished:
            return None
        if self._is_done:
            return self._output([self._completion(i, h) for i, h in enumerate(self._finished)])
        ended = self._beams[0].request
        return self._output(
            [
                CompletionOutput(
                    index=0,
                    text="",
                    token_ids=[],
                    finish_reason=ended.finish_reason,
                    stop_reason=ended.stop_reason,
                )
            ]
        )

    # One round.

    def _best_candidates(self) -> list[Candidate]:
        """The most probable continuations over all beams, best first."""
        every = [
            (beam.cum_logprob + logprob, beam, rank)
            for beam in self._beams
            for rank, logprob in enumerate(self._rows[beam.request].top_logprobs)
        ]
        best = nlargest(self._num_candidates, every, key=itemgetter(0))
        return [self._candidate(total, beam, rank) for total, beam, rank in best]

    def _candidate(self, cum_logprob: float, beam: Beam, rank: int) -> Candidate:
        """The beam with its next token number `rank`, the most probable one being 0."""
        row = self._rows[beam.request]
        logprob = Logprob(row.top_logprobs[rank], rank + 1)
        return Candidate(beam, row.top_token_ids[rank], cum_logprob, logprob)

    def _ends(self, candidate: Candidate) -> bool:
        return (
            candidate.token_id in self._eos_token_ids
            or self._num_new_tokens >= self._max_new_tokens
        )

    def _finish_some(self, best: Sequence[Candidate]) -> None:
        """Of the beam_width best candidates, those that end are finished; the best are kept."""
        width = self.params.beam_width
        if len(self._finished) == width and self.params.early_stopping is True:
            return
        for candidate in best:
            if self._ends(candidate):
                self._finished.append(self._hypothesis(candidate))
        self._finished.sort(key=attrgetter("score"), reverse=True)
        del self._finished[width:]

    def _hypothesis(self, candidate: Candidate) -> Hypothesis:
        by_eos = candidate.token_id in self._eos_token_ids
        return Hypothesis(
            token_ids=[*candidate.parent.request.output_token_ids, candidate.token_id],
            cum_logprob=candidate.cum_logprob,
            score=self._score(candidate.cum_logprob, self._num_new_tokens),
            logprobs=candidate.logprobs,
            finish_reason="stop" if by_eos else "length",
        )

    def _score(self, cum_logprob: float, num_new_tokens: int) -> float:
        return beam_score(cum_logprob, num_new_tokens, self.params.length_penalty)

    def _stops(self, going_on: Sequence[Candidate]) -> bool:
        """Whether no further step can improve what is finished, or none is possible."""
        if not going_on:
            return True
        if len(self._finished) < self.params.beam_width:
            return False
        if self.params.early_stopping is True:
            return True
        num_tokens = self._num_new_tokens
        if self.params.early_stopping == "never" and self.params.length_penalty > 0:
            num_tokens = self._max_new_tokens
        return self._score(going_on[0].cum_logprob, num_tokens) <= self._finished[-1].score

    def _continue(self, chosen: Sequence[Candidate], scheduler: Scheduler) -> None:
        """Fork, append, free. Ended beams go first: their slots and chunks serve the forks."""
        children: dict[Beam, list[Candidate]] = {}
        for candidate in chosen:
            children.setdefault(candidate.parent, []).append(candidate)
        for beam in [beam for beam in self._beams if beam not in children]:
            self._beams.remove(beam)
            self._end(beam, scheduler)
        self.leader.num_forks = 0
        for parent, (first, *others) in children.items():
            for candidate in others:
                self._beams.append(self._fork(candidate, scheduler))
            parent.logprobs, parent.cum_logprob = first.logprobs, first.cum_logprob
            parent.request.append(first.token_id)
            scheduler.resume(parent.request)

    def _end(self, beam: Beam, scheduler: Scheduler) -> None:
        scheduler.abort([beam.request], "abort")
        self._free_ids.append(beam.request.request_id)

    def _fork(self, candidate: Candidate, scheduler: Scheduler) -> Beam:
        parent = candidate.parent.request
        request_id = self._free_ids.pop()
        child = parent.clone(request_id, self.sequence_ids.index(request_id), parent.params)
        scheduler.fork(parent, child)
        child.append(candidate.token_id)
        return Beam(child, candidate.cum_logprob, candidate.logprobs)

    def _completion(self, index: int, found: Hypothesis) -> CompletionOutput:
        text = ""
        if self._tokenizer is not None:
            text = self._tokenizer.decode(found.token_ids, skip_special_tokens=True)
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=found.token_ids,
            cumulative_logprob=found.cum_logprob,
            logprobs=found.logprobs,
            finish_reason=found.finish_reason,
        )


def beam_search_output(
    output: RequestOutput, params: BeamSearchParams, tokenizer: Any | None
) -> BeamSearchOutput:
    """A finished search as sequences. Raises EngineError if it ended otherwise."""
    first = output.outputs[0]
    if first.finish_reason in ("abort", "error"):
        raise EngineError(
            f"beam search {output.request_id!r} ended with {first.finish_reason}: "
            f"{first.stop_reason}"
        )
    return BeamSearchOutput(
        [
            BeamSearchSequence(
                tokens=[*output.prompt_token_ids, *found.token_ids],
                cum_logprob=found.cumulative_logprob or 0.0,
                text=_text_of([*output.prompt_token_ids, *found.token_ids], tokenizer),
                score=beam_score(
                    found.cumulative_logprob or 0.0, len(found.token_ids), params.length_penalty
                ),
                logprobs=found.logprobs or [],
                finish_reason=found.finish_reason,
                stop_reason=found.stop_reason,
            )
            for found in output.outputs
        ]
    )


def _text_of(token_ids: list[int], tokenizer: Any | None) -> str | None:
    """As in vLLM, special tokens are shown."""
    return None if tokenizer is None else str(tokenizer.decode(token_ids))


def check_length_penalty(length_penalty: float, most_new_tokens: int) -> None:
    """Raises RequestError where scores of sequences that long could not be told apart."""
    num_digits = abs(length_penalty) * math.log10(max(1, most_new_tokens))
    if num_digits > MAX_DIGITS:
        raise RequestError(
            f"length_penalty is {length_penalty:g}, but {most_new_tokens} generated tokens to the "
            f"power of it must be within 1e-{MAX_DIGITS} and 1e{MAX_DIGITS}, to score by: say one "
            "nearer to 0, or a smaller max_tokens"
        )


def beam_score(cum_logprob: float, num_new_tokens: int, length_penalty: float) -> float:
    """What finished sequences are ranked by."""
    return float(cum_logprob / num_new_tokens**length_penalty)
