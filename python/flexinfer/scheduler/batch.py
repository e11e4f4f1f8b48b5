"""Batch: what one step computes. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from flexinfer.scheduler.request import Request

if TYPE_CHECKING:
    from flexinfer.vtensor import VTensor


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """Tokens [start, end) of one request go through the model in this step."""

    request: Request
    vtensor: VTensor
    start: int
    end: int
    samples: bool
    """Whether the last of them gives a new token."""
    draft: tuple[int, ...] = ()
    """The last tokens are these, which nobody has drawn yet: each, and the one before them, gives a
    new token as long as the drawn ones are the same (speculation/speculation.py)."""

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    def without_draft(self) -> ScheduledRequest:
        return replace(self, end=self.end - len(self.draft), draft=())


@dataclass(slots=True)
class Batch:
    """One step. `failed` requests have ended because they cannot get the memory they need."""

    items: list[ScheduledRequest] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    failed: list[Request] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items)


def plan_running(running: Iterable[Request], num_left: int) -> list[ScheduledRequest]:
    """The next tokens of requests that run, decodes first, at most num_left in all."""
    items = []
    for request in sorted(running, key=lambda request: request.is_prefilling):
        if num_left == 0:
            break
        if request.has_next_token:
            items.append(next_tokens(request, num_left))
            num_left -= items[-1].num_tokens
    return items


def next_tokens(request: Request, num_left: int) -> ScheduledRequest:
    """The next tokens of a running request, at most num_left of them."""
    assert request.vtensor is not None
    start = request.num_launched_tokens
    num_tokens = max(request.num_tokens, start + 1)  # one may be being sampled
    end = min(num_tokens, start + num_left)
    if request.stop_every is not None:
        end = min(end, (start // request.stop_every + 1) * request.stop_every)
    return ScheduledRequest(request, request.vtensor, start, end, end == num_tokens)
