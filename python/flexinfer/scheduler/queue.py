"""WaitingQueue: in which order waiting requests are admitted. No torch. Not thread-safe.

    fcfs       by arrival
    priority   by priority (a lower number first), then arrival
    prefix     by priority, then the longest cached prefix first, then arrival

Bound on starvation, for every policy: a request that found Q others in the queue is at the head
of it, before all that arrived later, once Q + max_passed_over first admissions have happened since.
It is *overdue* then: it waits for no shared prefix, and is the last to be preempted.

Invariants:
1. `_deadlines` holds the requests of `_queue` that are not overdue.
2. A request's key changes only while it is in neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from sortedcontainers import SortedKeyList

from flexinfer.scheduler.request import Request

WINDOW = 64
"""Requests that are looked at in one step, beyond those that may run: bounds a step's time."""

SortKey = tuple[bool, int, int, int]


class WaitingQueue:
    """Requests that have no memory yet, or no longer."""

    def __init__(self, policy: str, max_passed_over: int) -> None:
        self.policy = policy
        self.max_passed_over = max_passed_over
        self.num_admitted = 0
        """First admissions so far."""
        self.num_promoted = 0
        self._num_arrived = 0
        self._queue: SortedKeyList[Request] = SortedKeyList(key=self.key)
        self._deadlines: SortedKeyList[Request] = SortedKeyList(
            key=lambda r: (r.deadline, r.arrival_idx, r.index)
        )

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)

    def __contains__(self, request: Request) -> bool:
        return request in self._queue

    def key(self, request: Request) -> SortKey:
        """Order of admission; the running request with the largest is preempted first."""
        rank = 0 if self.policy == "fcfs" else request.priority
        return (not request.is_overdue, rank, request.arrival_idx, request.index)

    def add(self, request: Request) -> None:
        """A request arrives."""
        request.arrival_idx = self._num_arrived
        self._num_arrived += 1
        request.deadline = self.num_admitted + len(self._queue) + self.max_passed_over
        self.put_back(request)

    def put_back(self, request: Request) -> None:
        """A request that was preempted takes up its old place."""
        self._queue.add(request)
        if not request.is_overdue:
            self._deadlines.add(request)

    def discard(self, request: Request) -> None:
        self._queue.discard(request)
        if not request.is_overdue:
            self._deadlines.discard(request)

    def admit(self, request: Request) -> None:
        """The request leaves to run."""
        self.discard(request)
        if request.metrics.num_preemptions == 0:
            self.num_admitted += 1

    def promote(self) -> bool:
        """Make those overdue whose deadline has come; tells whether there were any."""
        promoted = False
        while self._deadlines and self._deadlines[0].deadline <= self.num_admitted:
            request = self._deadlines[0]
            self.discard(request)
            request.is_overdue = True
            self.num_promoted += 1
            self.put_back(request)
            promoted = True
        return promoted

    def candidates(self, num_wanted: int, match: Callable[[Request], int]) -> list[Request]:
        """The first in order, at most WINDOW more than `num_wanted`.

        `match` tells the cached tokens of a request; only the policy "prefix" asks.
        """
        first = list(islice(self._queue, num_wanted + WINDOW))
        if self.policy == "prefix":
            first.sort(key=lambda r: (*self.key(r)[:2], 0 if r.is_overdue else -match(r)))
        return first
