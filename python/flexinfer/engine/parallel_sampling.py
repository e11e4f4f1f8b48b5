"""ParallelSampling: n samples of one prompt, which is computed and held once.

    prompt  [chunk 0][chunk 1][tail]   computed by sample 0, then forked n - 1 times
    sample i  alias    alias   copied when sample i writes its first token there

All samples draw their first token from the same logits; from then on each is a request like any
other (PagedAttention, section 4.4). n = 1 is the plain case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flexinfer.engine.group import NewToken, RequestGroup, sequence_ids
from flexinfer.engine.output_builder import OutputBuilder
from flexinfer.engine.stream_pace import StreamPace
from flexinfer.errors import RequestError
from flexinfer.outputs import CompletionOutput, RequestOutput
from flexinfer.runner.plan import SampledToken
from flexinfer.sampling.params import RequestOutputKind
from flexinfer.scheduler.request import Request

if TYPE_CHECKING:
    from flexinfer.scheduler.scheduler import Scheduler


class ParallelSampling(RequestGroup):
    """The samples of one request, each with its own text and end."""

    def __init__(
        self, leader: Request, prompt: str | None, tokenizer: Any | None, pace: StreamPace
    ) -> None:
        """`leader` carries the caller's params; it becomes sample 0."""
        params = leader.params
        ids = sequence_ids(leader.request_id, params.num_samples)
        super().__init__(leader, prompt, ids)
        self.params = params
        leader.params = params.of_sample(0)
        leader.may_speculate = params.num_samples == 1
        leader.siblings = [
            leader.clone(ids[index], index, params.of_sample(index))
            for index in range(1, params.num_samples)
        ]
        leader.num_forks = len(leader.siblings)
        self._samples: list[Request] = [leader, *leader.siblings]
        self._builders = [OutputBuilder(sample, tokenizer, pace) for sample in self._samples]

    @property
    def sequences(self) -> Sequence[Request]:
        return self._samples

    @property
    def is_streamed(self) -> bool:
        return self.params.output_kind is not RequestOutputKind.FINAL_ONLY

    @property
    def is_finished(self) -> bool:
        return all(sample.is_finished for sample in self._samples)

    def update(self, sampled: Sequence[NewToken], scheduler: Scheduler) -> int:
        num_taken = 0
        for request, token in sampled:
            if request.is_finished:  # by a token before this one, of the same step
                continue
            request.append(token.token_id)
            self._builders[request.index].update(token)
            num_taken += 1
        self._fork_siblings(scheduler)
        for request in dict.fromkeys(request for request, _ in sampled):
            if request.is_finished:
                scheduler.finish(request)
        return num_taken

    def resume(self, token_ids: Sequence[int]) -> None:
        """Take these tokens as if they had been sampled, before there is anything to compute.
        Raises RequestError where the answer cannot be what it would have been."""
        leader, params = self.leader, self.params
        if params.num_samples > 1 or params.logprobs is not None or params.prompt_logprobs:
            raise RequestError("output_token_ids go with one sample, and without logprobs")
        for token_id in token_ids:
            if leader.is_finished:
                raise RequestError(f"output_token_ids go on after their end: {leader.stop_reason}")
            leader.append(token_id)
            self._builders[0].update(SampledToken(leader.sampling_id, token_id))

    def build(self) -> RequestOutput | None:
        kind = self.params.output_kind
        if kind is RequestOutputKind.FINAL_ONLY and not self.is_finished:
            return None
        due = [builder for builder in self._builders if builder.is_due]
        if not due:
            return None
        if self.params.num_samples > self.params.n:
            output = self._output(self._best())
        else:
            shown = due if kind is RequestOutputKind.DELTA else self._builders
            output = self._output([builder.build() for builder in shown])
        output.prompt_logprobs = self._builders[0].prompt_logprobs
        return output

    def end_with(self, failed: Request, scheduler: Scheduler) -> None:
        """Samples that were to be forked from the failed one end like it; others go on."""
        scheduler.abort(failed.siblings, failed.finish_reason or "error", failed.stop_message)

    def _fork_siblings(self, scheduler: Scheduler) -> None:
        """The prompt is computed: siblings run on forks of it, but for those that have ended."""
        leader = self.leader
        siblings, leader.siblings, leader.num_forks = leader.siblings, [], 0
        for sibling in siblings:
            if not sibling.is_finished:
                scheduler.fork(leader, sibling)

    def _best(self) -> list[CompletionOutput]:
        """The n most probable samples, most probable first, numbered anew.

        One that was cut off by a failure has fewer factors than it should: it comes last.
        """
        ranked = sorted(
            self._builders,
            key=lambda b: (b.request.finish_reason == "error", -b.cumulative_logprob),
        )
        return [
            replace(
                completion,
                index=index,
                logprobs=None if self.params.logprobs is None else completion.logprobs,
            )
            for index, completion in enumerate(b.build() for b in ranked[: self.params.n])
        ]
