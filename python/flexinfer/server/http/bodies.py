"""Large bodies: how much JSON one may hold, and how much of the event loop a tenant's may take.

To read JSON holds the GIL, so that a thread would not take it off the loop, nor leave the engine
its own. So what one body may hold is bounded by a count, it is read in slices of half a
millisecond with time for others between them, and the tenant's next one waits for a while.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np
from pydantic import BaseModel
from pydantic_core import from_json

from flexinfer.server.http.allowance import Allowance
from flexinfer.server.http.errors import bad_request
from flexinfer.server.http.long_lists import validate_lists

LARGE_BYTES = 16 << 10
MAX_CONTAINERS = 16_384
"""Objects and lists in one body: up to 10 us each."""
MAX_VALUES = 262_144
"""In one body, such as token ids: up to 0.2 us each."""
REST = 4
"""How much longer than a slice of a large body, or all of it, took a tenant's next one waits."""
SLICE_S = 0.0005
LONG_SLICE_S = 0.002
LONG_REST = 250
"""The same after a slice that could not be cut: those must be too rare to be seen by others. The
model takes longer for what can be read so long."""
MAX_REST_S = 4.0
TURNS_S_PER_S = 0.005
"""What a tenant's grammars may take of a core for long, beyond a burst, while others are served."""
TURNS_BURST_S = 0.02
MAX_TURN_REST_S = 8.0
MAX_REST_ALONE_S = 1.0
"""A turn's length is the clock's, which goes on while others have the cores."""
PIECE_BYTES = 128 << 10
BRACE_OF_BRACKET = ord("{") ^ ord("[")
"""The bit that makes a bracket a brace, and no other character."""


class Pace:
    """Work on the event loop in slices, measured in the thread's own time."""

    def __init__(self) -> None:
        self._since_s = time.thread_time()
        self._longest_s = 0.0

    async def pause(self) -> None:
        """To be called often: leaves the loop to others when a slice has been worked."""
        if time.thread_time() - self._since_s >= SLICE_S:
            await self.rest()

    async def rest(self) -> None:
        """Before and after what cannot be cut: leaves the loop to others in any case."""
        worked_s = time.thread_time() - self._since_s
        self._longest_s = max(self._longest_s, worked_s)
        await asyncio.sleep(REST * worked_s)
        self._since_s = time.thread_time()

    def rest_s(self) -> float:
        """At the end: how long the tenant's next body is to wait."""
        worked_s = time.thread_time() - self._since_s
        longest_s = max(self._longest_s, worked_s)
        if longest_s < LONG_SLICE_S:
            return REST * worked_s
        return min(LONG_REST * longest_s, MAX_REST_S)


async def check_size(body: bytes, pace: Pace) -> None:
    """Raises APIError 400 for more JSON than is read. Takes a ns a byte where the body
    holds few enough marks, wherever they stand, and a few ns where texts must be told apart."""
    if len(body) <= LARGE_BYTES or await _is_within_bounds(body, pace):
        return
    num_quotes = num_containers = num_values = start = 0
    while start < len(body):
        piece = _piece(body, start)
        start += len(piece)
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[num_quotes % 2 :: 2])
        num_quotes += len(parts) - 1
        containers = outside.count(b"{") + outside.count(b"[")
        num_containers += containers
        num_values += outside.count(b",") + containers
        if num_containers > MAX_CONTAINERS:
            raise _too_much(f"{MAX_CONTAINERS} objects and lists")
        if num_values > MAX_VALUES:
            raise _too_much(f"{MAX_VALUES} values")
        await pace.pause()


async def _is_within_bounds(body: bytes, pace: Pace) -> bool:
    """Whether all marks are few enough, were each of them one of JSON's own."""
    num_containers = num_commas = 0
    characters = np.frombuffer(body, np.uint8)
    for start in range(0, len(body), PIECE_BYTES):
        piece = characters[start : start + PIECE_BYTES]
        num_containers += int(np.count_nonzero(piece | BRACE_OF_BRACKET == ord("{")))
        num_commas += int(np.count_nonzero(piece == ord(",")))
        if num_containers > MAX_CONTAINERS or num_commas + num_containers > MAX_VALUES:
            return False
        await pace.pause()
    return True


def _piece(body: bytes, start: int) -> bytes:
    """From `start` on, without half an escape at its end. REQUIRES: none at its beginning."""
    piece = body[start : start + PIECE_BYTES]
    num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
    return piece if num_backslashes % 2 == 0 else body[start : start + PIECE_BYTES + 1]


async def read_large(body: bytes, kind: type[BaseModel] | None, pace: Pace) -> Any:
    """The JSON value of a large body, with long lists of objects already validated where it is to
    be a `kind`. Raises APIError 400, ValueError for what is not JSON."""
    await check_size(body, pace)
    await pace.rest()
    found = from_json(body)
    await pace.rest()
    if kind is not None:
        await validate_lists(found, kind, pace.pause)
    return found


class Turnstile:
    """One tenant's heavy work, piece by piece, for a small part of the time: large bodies of the
    loop's, grammars of a core's. For one event loop.
    """

    def __init__(self, has_others: Callable[[str], bool] = lambda tenant: True) -> None:
        """has_others: whether any but this tenant has been served of late."""
        self._has_others = has_others
        self._locks: dict[str, asyncio.Lock] = {}
        self._turns = Allowance(TURNS_S_PER_S, TURNS_BURST_S, MAX_TURN_REST_S)

    @asynccontextmanager
    async def reading(self, tenant: str) -> AsyncIterator[Pace]:
        """The tenant's turn to read a large body, at a pace. What the caller does after the `with`
        until it first waits belongs to it."""
        lock = await self._lock(tenant)
        loop, pace = asyncio.get_running_loop(), Pace()
        try:
            yield pace
        finally:
            loop.call_soon(lambda: loop.call_later(pace.rest_s(), lock.release))

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[list[Future[Any]]]:
        """The tenant's turn, until the ends of the `with` and of the work of threads that is put
        into the list: that goes on though nobody waits for it any more."""
        lock = await self._lock(tenant)
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        work: list[Future[Any]] = []

        def rest() -> None:
            worked_s = loop.time() - start_s
            rest_s = self._turns.delay_s(tenant, worked_s)
            if not self._has_others(tenant):
                rest_s = min(rest_s, REST * worked_s, MAX_REST_ALONE_S)
            loop.call_later(rest_s, lock.release)

        def rest_soon(_: Future[Any]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(rest)

        try:
            yield work
        finally:
            if work:
                work[-1].add_done_callback(rest_soon)
            else:
                rest()

    async def _lock(self, tenant: str) -> asyncio.Lock:
        lock = self._locks.setdefault(tenant, asyncio.Lock())
        await lock.acquire()
        return lock


def _too_much(what: str) -> Exception:
    return bad_request(f"the body holds more than {what}: split it", code="request_too_large")
