"""Batch: what one step computes. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
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

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(slots=True)
class Batch:
    """One step. `failed` requests have ended because they cannot get the memory they need."""

    items: list[ScheduledRequest] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    failed: list[Request] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items)


def next_tokens(request: Request, num_left: int) -> ScheduledRequest:
    """The next tokens of a running request, at most num_left of them."""
    assert request.vtensor is not None
    start = request.num_computed_tokens
    end = min(request.num_tokens, start + num_left)
    return ScheduledRequest(request, request.vtensor, start, end, end == request.num_tokens)
