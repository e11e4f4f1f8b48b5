"""Routers: policies that choose a replica for each request.

round-robin      one after the other
random           any
power-of-two     of two drawn at random, the one with fewer requests (Mitzenmacher, 2001)
prefix-affinity  as Ray Serve LLM's: the longest match if it is a tenth of the prompt or more,
                 otherwise who has least cached; power-of-two while loads differ too much
cached-prefix    ours: least work before the first token, matched tokens being none
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flexinfer.routing.blocks import BLOCK_TOKENS
from flexinfer.routing.prefix_index import PrefixIndex


@dataclass(slots=True)
class ReplicaLoad:
    """What a router knows of a replica's load: what it has sent there itself."""

    num_requests: int = 0
    """That have not ended."""
    num_waiting_tokens: int = 0
    """Of prompts whose first token has not come, without what was taken to be cached."""


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    num_tokens: int
    blocks: Sequence[int]
    """`hash_blocks` of it."""


class Router(ABC):
    """Not thread-safe."""

    def __init__(self, index: PrefixIndex, seed: int = 0) -> None:
        self.index = index
        self._rng = random.Random(seed)

    @abstractmethod
    def choose(self, prompt: RoutedPrompt, loads: Mapping[int, ReplicaLoad]) -> int:
        """The number of one of the replicas in `loads`."""


class RoundRobin(Router):
    _last = -1

    def choose(self, prompt: RoutedPrompt, loads: Mapping[int, ReplicaLoad]) -> int:
        self._last += 1
        return list(loads)[self._last % len(loads)]


class Random(Router):
    def choose(self, prompt: RoutedPrompt, loads: Mapping[int, ReplicaLoad]) -> int:
        return self._rng.choice(list(loads))


class PowerOfTwo(Router):
    def choose(self, prompt: RoutedPrompt, loads: Mapping[int, ReplicaLoad]) -> int:
        return self._of_two(loads, loads)

    def _of_two(self, among: Iterable[int], loads: Mapping[int, ReplicaLoad]) -> int:
        drawn = list(among)
        drawn = self._rng.sample(drawn, min(2, len(drawn)))
        return min(drawn, key=lambda replica: loads[replica].num_requests)


class PrefixAffinity(PowerOfTwo):
    MIN_MATCH = 0.1
    MAX_IMBALANCE = 32
    """Requests between the most and the least loaded replica. Ray's own default is no bound."""

    def choose(self, prompt: RoutedPrompt, loads: Mapping[int, ReplicaLoad]) -> int:
        counts = [load.num_requests for load in loads.values()]
        if max(counts) - min(counts) > self.MAX_IMBALANCE:
            return super().choose(prompt, loads)
        matches = {r: n for r, n in self.index.matches(prompt.blocks).items() if r in loads}
        longest = max(matches.values(), default=0)
        if longest and longest >= self.MIN_MATCH * len(prompt.blocks):
            best = [replica for replica, match in matches.items() if match == longest]
            return self._of_two(best, loads)
        sizes = {replica: self.index.num_blocks(replica) for replica in loads}
        least = min(sizes.values())
        return self._of_two([r for r, size in sizes.items() if size == least], loads)


class CachedPrefix(Router):
    """Weighs the tokens that a replica would have to compute for this request against those that it
    has yet to compute for others. A long match attracts until its replica is so much busier that
    computing anew elsewhere costs less; then the prefix gets a second home."""

    COMPUTED_WEIGHT = 12
    """A token computed again also delays all that come after it, and pushes others' KV out. With 4
    Mooncake's conversations found 2 to 5 % less than by following prefixes at any load; with 12
    and 24 as much, and no request waited longer (benchmarks/scale_out)."""
    REQUEST_TOKENS = 16
    """What a running request counts as, in tokens that wait."""

    def choose(self, prompt: RoutedPrompt, loads: Mapping[int, ReplicaLoad]) -> int:
        matches = self.index.matches(prompt.blocks)

        def cost(replica: int) -> tuple[int, float]:
            load = loads[replica]
            to_compute = prompt.num_tokens - BLOCK_TOKENS * matches.get(replica, 0)
            waiting = load.num_waiting_tokens + self.REQUEST_TOKENS * load.num_requests
            return waiting + self.COMPUTED_WEIGHT * to_compute, self._rng.random()

        return min(loads, key=cost)


ROUTERS: dict[str, type[Router]] = {
    "round-robin": RoundRobin,
    "random": Random,
    "power-of-two": PowerOfTwo,
    "prefix-affinity": PrefixAffinity,
    "cached-prefix": CachedPrefix,
}
