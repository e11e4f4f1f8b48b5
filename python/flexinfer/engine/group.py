"""RequestGroup: what one caller asked for: a sequence, or several forked from one prompt.

The scheduler knows single requests; the group decides what follows when they get tokens, and
makes the caller's outputs. Not thread-safe.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flexinfer.outputs import CompletionOutput, RequestOutput
from flexinfer.scheduler.request import Request

if TYPE_CHECKING:
    from flexinfer.lora.request import LoRARequest
    from flexinfer.runner.plan import SampledToken
    from flexinfer.scheduler.scheduler import Scheduler

NewToken = tuple[Request, "SampledToken"]
"""A sequence, and the token that was sampled for it."""


class RequestGroup(ABC):
    """
    Invariant: `sequences` has every request that the scheduler holds for this group.
    """

    def __init__(self, leader: Request, prompt: str | None, sequence_ids: Sequence[str]) -> None:
        self.leader = leader
        """The request whose prompt is computed, and from which the others are forked."""
        self.request_id = leader.request_id
        self.sequence_ids = tuple(sequence_ids)
        """Ids of all requests that this group may ever give to the scheduler."""
        self._prompt = prompt
        self.lora_request: LoRARequest | None = None
        """What its caller has chosen; outputs tell it."""

    @property
    @abstractmethod
    def sequences(self) -> Sequence[Request]:
        """Those that have not ended, and maybe some that have."""

    @property
    def is_streamed(self) -> bool:
        """Whether the caller gets outputs before the end."""
        return False

    @property
    @abstractmethod
    def is_finished(self) -> bool: ...

    @abstractmethod
    def update(self, sampled: Sequence[NewToken], scheduler: Scheduler) -> int:
        """Some of the sequences got tokens in this step, one each, or several in order where they
        were speculated: append, end, fork, free. Returns how many were wanted: none is after the
        one that ends its sequence."""

    @abstractmethod
    def end_with(self, failed: Request, scheduler: Scheduler) -> None:
        """One of the sequences could not be served: end those that cannot go on without it."""

    @abstractmethod
    def build(self) -> RequestOutput | None:
        """The caller's next output; None if the caller wants none now."""

    def unfinished(self) -> list[Request]:
        return [request for request in self.sequences if not request.is_finished]

    def failure(self, message: str) -> RequestOutput:
        """The last output of a group whose outputs cannot be built."""
        completion = CompletionOutput(
            index=0, text="", token_ids=[], finish_reason="error", stop_reason=message
        )
        return self._output([completion])

    def _output(self, completions: list[CompletionOutput]) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self.leader.prompt_token_ids,
            outputs=completions,
            finished=self.is_finished,
            metrics=self.leader.metrics,
            num_cached_tokens=self.leader.num_cached_tokens,
            lora_request=self.lora_request,
            cache_limit=self.leader.cache_limit,
        )


def sequence_ids(request_id: str, num_sequences: int) -> list[str]:
    """The first sequence has the caller's id, the others one derived from it."""
    return [request_id, *(f"{request_id}#{index}" for index in range(1, num_sequences))]
