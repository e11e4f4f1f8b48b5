"""Fleet: replicas behind a router, in virtual time. What happens first is computed first."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from flexinfer.outputs import RequestMetrics
from flexinfer.routing.blocks import BLOCK_TOKENS, hash_blocks
from flexinfer.routing.prefix_index import PrefixIndex
from flexinfer.routing.routers import ROUTERS, ReplicaLoad, RoutedPrompt
from flexinfer.sampling.params import SamplingParams
from flexinfer.scheduler.request import Request
from flexinfer.simulation.arrivals import Arrival
from flexinfer.simulation.replica import ReplicaShape, SimulatedReplica


@dataclass(slots=True)
class Routed:
    """One request and where it went. Times in seconds of the simulation."""

    replica: int
    num_prompt_tokens: int
    num_elsewhere_tokens: int
    """Of the prompt, cached by another replica beyond what this one had: what a hand-over between
    replicas would have moved, and was computed again."""
    arrival_s: float
    num_waiting_tokens: int
    """What it adds to the load until its first token."""
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    first_token_s: float | None = None
    end_s: float | None = None
    error: str | None = None


@dataclass(slots=True)
class FleetRun:
    requests: list[Routed] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    """Of each replica."""
    num_steps: int = 0
    end_s: float = 0.0


class Fleet:
    def __init__(self, num_replicas: int, shape: ReplicaShape, router: str, seed: int = 0) -> None:
        """router: one of ROUTERS. Raises ValueError for less than one replica."""
        if num_replicas < 1:
            raise ValueError(f"a fleet has at least one replica, got {num_replicas}")
        num_tokens = shape.kv_cache_bytes // shape.spec.bytes_per_token
        self._index = PrefixIndex(max(1, num_tokens // BLOCK_TOKENS))
        self._router = ROUTERS[router](self._index, seed)
        self._replicas = [SimulatedReplica(shape) for _ in range(num_replicas)]
        self._loads = {number: ReplicaLoad() for number in range(num_replicas)}
        self._routed: dict[str, Routed] = {}
        self._step_ends: list[tuple[float, int]] = []
        self._now_s = 0.0

    def run(
        self, arrivals: Iterable[Arrival], on_end: Callable[[], None] = lambda: None
    ) -> FleetRun:
        """Everything from the first arrival to the last token. on_end: called after each request.
        The fleet cannot be used again."""
        run = FleetRun()
        try:
            for number, arrival in enumerate(arrivals):
                for ended in self._advance_to(arrival.time_s):
                    on_end()
                    run.end_s = ended.end_s or run.end_s
                run.requests.append(self._route(str(number), arrival))
            for ended in self._advance_to(float("inf")):
                on_end()
                run.end_s = ended.end_s or run.end_s
            run.busy_s = [replica.busy_s for replica in self._replicas]
            run.num_steps = sum(replica.num_steps for replica in self._replicas)
        finally:
            for replica in self._replicas:
                replica.close()
        return run

    def _route(self, name: str, arrival: Arrival) -> Routed:
        tokens = arrival.prompt_token_ids
        blocks = hash_blocks(tokens)
        chosen = self._router.choose(RoutedPrompt(len(tokens), blocks), self._loads)
        matches = self._index.matches(blocks)
        matched = BLOCK_TOKENS * matches.get(chosen, 0)
        elsewhere = BLOCK_TOKENS * max(matches.values(), default=0) - matched
        self._index.add(chosen, blocks)
        routed = Routed(chosen, len(tokens), elsewhere, self._now_s, len(tokens) - matched)
        self._routed[name] = routed
        self._loads[chosen].num_requests += 1
        self._loads[chosen].num_waiting_tokens += routed.num_waiting_tokens
        request = Request(
            request_id=name,
            prompt_token_ids=tokens,
            params=SamplingParams(max_tokens=arrival.num_output_tokens, ignore_eos=True),
            max_num_tokens=len(tokens) + arrival.num_output_tokens,
            metrics=RequestMetrics(arrival_time=self._now_s),
        )
        replica = self._replicas[chosen]
        replica.scheduler.add(request)
        if not replica.is_computing:
            self._begin_step(chosen)
        return routed

    def _advance_to(self, time_s: float) -> Iterator[Routed]:
        """All steps that end by then; yields the requests that end with them."""
        while self._step_ends and self._step_ends[0][0] <= time_s:
            self._now_s, number = heapq.heappop(self._step_ends)
            self._replicas[number].end_step(self._note_first_token)
            self._begin_step(number)
            yield from self._take_ended(number)
        self._now_s = time_s

    def _begin_step(self, number: int) -> None:
        seconds = self._replicas[number].begin_step()
        if seconds is not None:
            heapq.heappush(self._step_ends, (self._now_s + seconds, number))

    def _note_first_token(self, request: Request) -> None:
        routed = self._routed[request.request_id]
        routed.first_token_s = self._now_s
        self._loads[routed.replica].num_waiting_tokens -= routed.num_waiting_tokens

    def _take_ended(self, number: int) -> Iterator[Routed]:
        for request in self._replicas[number].scheduler.take_ended():
            routed = self._routed.pop(request.request_id)
            routed.end_s = self._now_s
            routed.num_cached_tokens = request.num_cached_tokens or 0
            routed.num_output_tokens = request.num_output_tokens
            routed.num_preemptions = request.metrics.num_preemptions
            if request.finish_reason == "error":
                routed.error = request.stop_message
            load = self._loads[number]
            load.num_requests -= 1
            if routed.first_token_s is None:
                load.num_waiting_tokens -= routed.num_waiting_tokens
            yield routed
