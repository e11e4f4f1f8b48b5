"""CachedPrefixRouter: the policy of `flexinfer.routing`, the simulation's, as a router of Serve.

A process that sends requests has one. It knows what it has sent itself, and what replicas can hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from flexinfer.ray.calls import Call
from flexinfer.routing.blocks import BLOCK_TOKENS
from flexinfer.routing.prefix_index import PrefixIndex
from flexinfer.routing.routers import CachedPrefix, ReplicaLoad, RoutedPrompt

DEFAULT_CAPACITY_TOKENS = 1 << 20
"""Of replicas that do not tell theirs."""


class CachedPrefixRouter(RequestRouter):  # type: ignore[misc]
    """Runs in one event loop."""

    def initialize_state(self, seed: int = 0) -> None:
        self._index = PrefixIndex(DEFAULT_CAPACITY_TOKENS // BLOCK_TOKENS)
        self._policy = CachedPrefix(self._index, seed)
        self._numbers: defaultdict[ReplicaID, int] = defaultdict(count().__next__)
        self._loads: defaultdict[int, ReplicaLoad] = defaultdict(ReplicaLoad)
        self._waiting: dict[tuple[int, str], int] = {}
        """(replica, request) -> tokens that it has yet to compute; 0 once it answers."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The best one, and after it all others, for when its queue is full."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        by_number = {self._numbers[r.replica_id]: r for r in candidate_replicas}
        loads = {number: self._loads[number] for number in by_number}
        best = by_number.pop(self._policy.choose(_prompt_of(pending_request), loads))
        return [[best], list(by_number.values())]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        number, prompt = self._numbers[replica_id], _prompt_of(pending_request)
        matched = BLOCK_TOKENS * self._index.matches(prompt.blocks).get(number, 0)
        key = number, pending_request.metadata.internal_request_id
        self._waiting[key] = prompt.num_tokens - matched
        self._loads[number].num_requests += 1
        self._loads[number].num_waiting_tokens += self._waiting[key]
        self._index.add(number, prompt.blocks)
        for call in _calls(pending_request):
            call.on_answer = lambda: self._event_loop.call_soon_threadsafe(self._note_answer, key)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        key = self._numbers[replica_id], internal_request_id
        if key in self._waiting:  # else it was not accepted, or its replica has died
            self._note_answer(key)
            del self._waiting[key]
            self._loads[key[0]].num_requests -= 1

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

    def _note_answer(self, key: tuple[int, str]) -> None:
        if key in self._waiting:
            self._loads[key[0]].num_waiting_tokens -= self._waiting[key]
            self._waiting[key] = 0

    def _forget(self, replica_id: ReplicaID) -> None:
        number = self._numbers.pop(replica_id, None)
        if number is not None:
            self._index.clear(number)
            self._loads.pop(number, None)
            for key in [key for key in self._waiting if key[0] == number]:
                del self._waiting[key]


def _calls(pending: PendingRequest | None) -> Sequence[Call]:
    return [] if pending is None else [arg for arg in pending.args if isinstance(arg, Call)]


def _prompt_of(pending: PendingRequest | None) -> RoutedPrompt:
    return next((call.routed_prompt() for call in _calls(pending)), RoutedPrompt(0, ()))
