"""CachedPrefixRouter: the policy of `flexinfer.routing`, the simulation's, as a router of Serve.

A process that sends requests has one. It knows what it has sent itself, and what replicas can hold.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from flexinfer.ray.named_replicas import calls_of
from flexinfer.routing.blocks import BLOCK_TOKENS
from flexinfer.routing.prefix_index import PrefixIndex
from flexinfer.routing.routers import CachedPrefix, ReplicaLoad, RoutedPrompt

DEFAULT_CAPACITY_TOKENS = 1 << 20
"""Of replicas that do not tell theirs."""


@dataclass(slots=True)
class _Booking:
    """A request's part of a replica's load."""

    number: int
    """Of the replica."""
    num_waiting_tokens: int
    """That it has yet to compute; 0 once it answers."""
    is_accepted: bool = False


class CachedPrefixRouter(RequestRouter):  # type: ignore[misc]
    """Runs in one event loop."""

    def initialize_state(self, seed: int = 0) -> None:
        self._index = PrefixIndex(DEFAULT_CAPACITY_TOKENS // BLOCK_TOKENS)
        self._policy = CachedPrefix(self._index, seed)
        self._numbers: defaultdict[ReplicaID, int] = defaultdict(count().__next__)
        self._loads: defaultdict[int, ReplicaLoad] = defaultdict(ReplicaLoad)
        self._bookings: dict[str, _Booking] = {}
        """Of each request that has a replica, by Serve's id of it."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The best one, and after it all others, for when its queue is full."""
        prompt = _prompt_of(pending_request)
        by_number = {self._numbers[r.replica_id]: r for r in candidate_replicas}
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            self._cancel(pending_request.metadata.internal_request_id)  # chosen before, in vain
        best = self._policy.choose(prompt, {number: self._loads[number] for number in by_number})
        if pending_request is not None:
            self._book(pending_request, best)
        return [[by_number.pop(best)], list(by_number.values())]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """The replica has accepted the request."""
        name, number = pending_request.metadata.internal_request_id, self._numbers[replica_id]
        booking = self._bookings.get(name)
        if booking is None or booking.number != number:  # the best one was full
            self._cancel(name)
            booking = self._book(pending_request, number)
        booking.is_accepted = True
        self._index.add(number, _prompt_of(pending_request).blocks)
        for call in calls_of(pending_request):
            call.on_answer = lambda: self._event_loop.call_soon_threadsafe(self._note_answer, name)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        booking = self._bookings.get(internal_request_id)
        if booking is not None and booking.number == self._numbers.get(replica_id):
            self._cancel(internal_request_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        for replica_id in set(self._numbers) - {replica.replica_id for replica in replicas}:
            self._forget(replica_id)
        told = [r.replica_metadata.get("capacity_tokens") for r in replicas]
        if known := [tokens for tokens in told if tokens]:
            self._index.max_blocks = max(1, min(known) // BLOCK_TOKENS)
        super().update_replicas(replicas)

    def _book(self, pending: PendingRequest, number: int) -> _Booking:
        """From its choice on a request is load: until its replica accepts it, which takes a way
        there and back, others are chosen for that must know of it."""
        name, prompt = pending.metadata.internal_request_id, _prompt_of(pending)
        matched = BLOCK_TOKENS * self._index.matches(prompt.blocks).get(number, 0)
        booking = self._bookings[name] = _Booking(number, prompt.num_tokens - matched)
        self._loads[number].num_requests += 1
        self._loads[number].num_waiting_tokens += booking.num_waiting_tokens
        # Serve says nothing of a request that is cancelled before it is sent, but forgets it.
        loop = self._event_loop
        weakref.finalize(pending, _call_in, loop, self._cancel_unsent, booking, name).atexit = False
        return booking

    def _cancel(self, name: str) -> None:
        if name in self._bookings:
            self._note_answer(name)
            self._loads[self._bookings.pop(name).number].num_requests -= 1

    def _cancel_unsent(self, booking: _Booking, name: str) -> None:
        if self._bookings.get(name) is booking and not booking.is_accepted:
            self._cancel(name)

    def _note_answer(self, name: str) -> None:
        booking = self._bookings.get(name)
        if booking is not None:
            self._loads[booking.number].num_waiting_tokens -= booking.num_waiting_tokens
            booking.num_waiting_tokens = 0

    def _forget(self, replica_id: ReplicaID) -> None:
        number = self._numbers.pop(replica_id, None)
        if number is not None:
            self._index.clear(number)
            self._loads.pop(number, None)
            for name in [n for n, booking in self._bookings.items() if booking.number == number]:
                del self._bookings[name]


def _call_in(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *args: Any) -> None:
    """From any thread, as finalizers are called."""
    with suppress(RuntimeError):  # the loop has ended, and everything with it
        loop.call_soon_threadsafe(call, *args)


def _prompt_of(pending: PendingRequest | None) -> RoutedPrompt:
    return next((call.routed_prompt() for call in calls_of(pending)), RoutedPrompt(0, ()))
