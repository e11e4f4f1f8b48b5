"""Limits: how much is served at the same time, and how large a request's body may be."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flexinfer.server.http.allowance import Allowance
from flexinfer.server.http.errors import APIError, bad_request, error_response

MAX_RETRY_AFTER_S = 60
PACE_WINDOW = 64
"""Sequences whose ends tell how fast a queue drains."""
RECENT_S = 60.0
"""A tenant that was served so long ago is there."""
UPLOAD_BYTES_PER_S = 4 << 20
"""Of a tenant's large bodies together: a million of tokens, which no engine computes. What arrives
takes of the event loop, whatever is made of it later: four connections that sent as fast as they
could took a third of it."""
UPLOAD_BURST_BYTES = 8 << 20


class Limits:
    """Counts sequences, that is prompts times samples, in the engine. For one event loop.

    Invariant: at most `capacity` sequences are counted, and `per_key` of each tenant.
    """

    def __init__(self, num_running: int, num_waiting: int, per_key: int | None) -> None:
        """Up to `num_running` compute at the same time, `num_waiting` more may wait for them."""
        self.capacity = num_running + num_waiting
        self.num_active = 0
        self._num_running = num_running
        self._per_key = per_key
        self._active_of: Counter[str] = Counter()
        self._last_s: dict[str, float] = {}  # by tenant; the latest one stands last
        self._ends: deque[float] = deque(maxlen=PACE_WINDOW)
        self._busy_since_s = 0.0

    @contextmanager
    def hold(self, tenant: str, num_sequences: int) -> Iterator[None]:
        """Count these sequences meanwhile. Raises APIError 429 when they are too many now, 400
        when they would always be."""
        self._check(tenant, num_sequences)
        if not self.num_active:
            self._ends.clear()
            self._busy_since_s = time.monotonic()
        self.num_active += num_sequences
        self._active_of[tenant] += num_sequences
        self._last_s.pop(tenant, None)
        self._last_s[tenant] = time.monotonic()
        try:
            yield
        finally:
            self.num_active -= num_sequences
            self._active_of[tenant] -= num_sequences
            if not self._active_of[tenant]:
                del self._active_of[tenant]
            self._ends.extend([time.monotonic()] * num_sequences)

    def has_others(self, tenant: str) -> bool:
        """Whether anybody else has been served of late."""
        latest = next((other for other in reversed(self._last_s) if other != tenant), None)
        return latest is not None and time.monotonic() - self._last_s[latest] < RECENT_S

    @property
    def retry_after_s(self) -> int:
        """About how long until what waits now is served: the queue over what ends per second.

        Until as many have ended as run at once, those that run are taken to end now.
        """
        num_waiting = max(1, self.num_active - self._num_running)
        if len(self._ends) == self._ends.maxlen:
            since_s, num_ended = self._ends[0], len(self._ends) - 1
        else:
            since_s = self._busy_since_s
            num_ended = max(1, len(self._ends), min(self._num_running, self.num_active))
        seconds = (time.monotonic() - since_s) * num_waiting / num_ended
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(seconds)))

    def _check(self, tenant: str, num_sequences: int) -> None:
        largest = self.capacity if self._per_key is None else min(self.capacity, self._per_key)
        if num_sequences > largest:
            raise bad_request(
                f"the request has {num_sequences} sequences (prompts times n), at most {largest} "
                "are served at the same time: split it"
            )
        if self.num_active + num_sequences > self.capacity:
            raise self._too_many(f"{self.num_active} sequences are being served or wait")
        active = self._active_of[tenant]
        if self._per_key is not None and active + num_sequences > self._per_key:
            raise self._too_many(f"this API key has {active} sequences, of {self._per_key} at once")

    def _too_many(self, why: str) -> APIError:
        seconds = self.retry_after_s
        return APIError(
            429,
            f"too many requests: {why}; try again in about {seconds} s",
            code="queue_full",
            headers={"Retry-After": str(seconds)},
        )


class BodyLimitMiddleware:
    """Answers 413 to bodies above a size, whether they say their length or not; reads those that
    are long at a tenant's pace: what it sends faster waits in its own sockets."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._uploads = Allowance(UPLOAD_BYTES_PER_S, UPLOAD_BURST_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = next((v for k, v in scope["headers"] if k == b"content-length"), b"0")
        if not declared.isdigit() or int(declared) > self._max_bytes:
            await error_response(self._too_large(), scope["path"])(scope, receive, send)
            return
        num_bytes = 0
        tenant = scope.get("state", {}).get("tenant", "")

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise self._too_large()
            if message.get("more_body"):
                await asyncio.sleep(self._uploads.delay_s(tenant, len(message["body"])))
            return message

        await self._app(scope, counted, send)

    def _too_large(self) -> APIError:
        return APIError(
            413, f"the body is larger than {self._max_bytes} bytes", code="request_too_large"
        )
