"""Connection: uvicorn's HTTP protocol, with an end to requests that arrive too slowly.

uvicorn waits for a request's head and body without bound, so that a few hundred idle sockets could
hold what the process may open. Needs httptools. It also passes over the offer to change to HTTP/2
(h2c) that Java's HttpClient makes: the parser would take the body for the other protocol's bytes.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MIN_BYTES_PER_S = 16 << 10
"""A body may take `receive_timeout_s`, and a second more per so many bytes."""
_OFFER = re.compile(rb"^Upgrade(?=:[ \t]*h2c[ \t]*\r?$)", re.IGNORECASE | re.MULTILINE)
_HIDDEN = b"X-Offer"  # as long as the name that it replaces
_TIMEOUT = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class Connection(HttpToolsProtocol):
    """Between two requests uvicorn's own time for idle connections holds."""

    def __init__(self, *args: Any, receive_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._receive_timeout_s = receive_timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._deadline_s = 0.0
        self._in_request = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._in_request:
            data = _without_offer(data)
            if self._timer is None:  # it may be less than the beginning of a request
                self._expect()
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._in_request = True
        if self._timer is None:  # a second one in the same packet
            self._expect()
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        self._deadline_s += len(body) / MIN_BYTES_PER_S
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_request = False
        self._stop_timer()
        super().on_message_complete()

    def _expect(self) -> None:
        """A whole request from now on, in time."""
        self._deadline_s = self.loop.time() + self._receive_timeout_s
        self._timer = self.loop.call_at(self._deadline_s, self._look)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        if self.loop.time() < self._deadline_s:
            self._timer = self.loop.call_at(self._deadline_s, self._look)
            return
        self._timer = None
        if self.transport.is_closing():
            return
        if self._in_request and (self.cycle is None or not self.cycle.response_started):
            self.transport.write(_TIMEOUT)
        self.transport.close()


def _without_offer(data: bytes) -> bytes:
    """A packet with the head of a request, without its offer of h2c. Nothing else changes, and no
    length: a body may follow."""
    end = data.find(b"\r\n\r\n")
    head = data if end < 0 else data[:end]
    if b"h2c" not in head.lower():
        return data
    return _OFFER.sub(_HIDDEN, head) + data[len(head) :]
