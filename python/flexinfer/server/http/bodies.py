"""Large bodies: how much JSON one may hold, and how much of the event loop a tenant's may take.

To read JSON holds the GIL, so that a thread would not take it off the loop: 0.1 to 10 us a value.
So what one body may hold is bounded by a count that costs little, and between two large bodies of
one tenant the loop is left to others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from flexinfer.server.http.errors import bad_request

LARGE_BYTES = 16 << 10
MAX_CONTAINERS = 16_384
"""Objects and lists in one body: up to 10 us each."""
MAX_VALUES = 262_144
"""In one body, such as token ids: up to 0.2 us each."""
REST = 4
"""How much longer than a large body took a tenant's next one waits."""


def check_size(body: bytes) -> None:
    """Raises APIError 400 for more JSON than is read. Takes a ns a byte where the body
    holds few enough marks, wherever they stand, and a few ns where texts must be told apart."""
    if len(body) <= LARGE_BYTES or _is_within_bounds(body):
        return
    text = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if text.count(b'"') > 4 * MAX_VALUES:  # a key and a text
        raise _too_much(f"more than {2 * MAX_VALUES} texts")
    outside = _outside_of_texts(text)
    num_containers = outside.count(b"{") + outside.count(b"[")
    if num_containers > MAX_CONTAINERS:
        raise _too_much(f"{num_containers} objects and lists, of at most {MAX_CONTAINERS}")
    num_values = outside.count(b",") + num_containers
    if num_values > MAX_VALUES:
        raise _too_much(f"{num_values} values, of at most {MAX_VALUES}")


def _is_within_bounds(body: bytes) -> bool:
    """Whether all marks are few enough, were each of them one of JSON's own."""
    num_containers = body.count(b"{") + body.count(b"[")
    return (
        num_containers <= MAX_CONTAINERS
        and body.count(b",") + num_containers <= MAX_VALUES
        and body.count(b'"') <= 4 * MAX_VALUES
    )


def _outside_of_texts(text: bytes) -> bytes:
    """What stands between quotes left out. REQUIRES: no quote is escaped."""
    return b"".join(text.split(b'"')[::2])


class Turnstile:
    """One tenant's heavy work, piece by piece, for at most a part 1 / (1 + REST) of the time: large
    bodies of the loop's, grammars of a core's. For one event loop.
    """

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}

    async def enter(self, tenant: str, num_bytes: int) -> None:
        """Wait for the tenant's turn. What the caller does until it first waits is measured."""
        if num_bytes <= LARGE_BYTES:
            return
        leave = await self._acquire(tenant)
        # It runs when the caller has read its body, and waits.
        asyncio.get_running_loop().call_soon(leave)

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """The tenant's turn, until the end of the `with`."""
        leave = await self._acquire(tenant)
        try:
            yield
        finally:
            leave()

    async def _acquire(self, tenant: str) -> Callable[[], object]:
        """Returns what lets the tenant's next one in, after a rest."""
        lock = self._locks.setdefault(tenant, asyncio.Lock())
        await lock.acquire()
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        return lambda: loop.call_later(REST * (loop.time() - start_s), lock.release)


def _too_much(what: str) -> Exception:
    return bad_request(f"the body holds {what}: split the request", code="request_too_large")
