"""AdapterTurns: which adapters requests may start with, where at most `max_loras` run. No torch.

A request whose adapter finds no place waits, and later ones with adapters that run pass it: they
cost no place. So that they cannot keep all places for ever, the first that waits for one *closes*
an adapter, and no later request starts with that one. Its place is free when those that run with it
have ended, whatever arrives.

    max_loras 2, running: A1 B1 A2       the newest of B is older than the newest of A: B is closed
    waiting, in order:    B2  C1  A3 B3  B2 goes before C1 and starts; A3 passes it, B3 does not

Closed is the adapter whose last admission is the longest ago. Nothing is remembered for that: an
adapter that is closed gets no admissions, so that it is the same one in the next step.

Of one pass over the queue. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterable

from flexinfer.scheduler.request import Request


class AdapterTurns:
    """REQUIRES: `waits` is asked of each request in the order of the queue, `start` told of each
    that is admitted."""

    def __init__(self, max_loras: int, running: Iterable[Request]) -> None:
        """running: in the order of their admission."""
        self._max_loras = max_loras
        self._in_use: dict[int, None] = {}  # the one whose last admission is the longest ago first
        self._closed = 0
        for request in running:
            self.start(request)

    def waits(self, request: Request) -> bool:
        """Whether it has to wait: for a place, or behind one that waits for its adapter's place."""
        adapter = request.adapter
        if not adapter:
            return False
        if adapter in self._in_use:
            return adapter == self._closed
        if len(self._in_use) < self._max_loras:
            return False
        self._closed = self._closed or next(iter(self._in_use))
        return True

    def start(self, request: Request) -> None:
        """It runs."""
        if request.adapter:
            self._in_use.pop(request.adapter, None)
            self._in_use[request.adapter] = None
