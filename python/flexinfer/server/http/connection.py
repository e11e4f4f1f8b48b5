"""Connection: uvicorn's HTTP protocol, with an end to requests that arrive too slowly, and to heads
that are too large.

Hundreds that send a byte now and then would keep the event loop busy: their bytes are left to
gather in the kernel.

uvicorn waits for a request's head and body without bound, so that a few hundred idle sockets could
hold what the process may open, and keeps headers without bound. Needs httptools. It also passes
over the offer to change to HTTP/2 (h2c) that Java's HttpClient makes: the parser would take the
body for the other protocol's bytes.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MIN_BYTES_PER_S = 16 << 10
"""A body may take `receive_timeout_s`, and a second more per so many bytes."""
SMALL_PIECE_BYTES = 1024
NUM_SMALL_PIECES = 4
"""In a row, of one request, that are read as they come; then ever more are awaited."""
FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 1.0
MAX_HEAD_BYTES = 64 << 10
"""Of a request's line and its headers; trailers count too."""
_OFFER = re.compile(rb"^Upgrade(?=:[ \t]*h2c[ \t]*\r?$)", re.IGNORECASE | re.MULTILINE)
_HIDDEN = b"X-Offer"  # as long as the name that it replaces
_NO_MORE = b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_TIMEOUT = b"HTTP/1.1 408 Request Timeout" + _NO_MORE
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large" + _NO_MORE


class Connection(HttpToolsProtocol):
    """Between two requests uvicorn's own time for idle connections holds."""

    def __init__(self, *args: Any, receive_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._receive_timeout_s = receive_timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._deadline_s = 0.0
        self._in_request = self._in_head = False
        self._kept_bytes = 0
        """Of a head, or of what follows the last piece of a body: trailers."""
        self._num_small_pieces = 0

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
        self._kept_bytes += len(data)
        super().data_received(data)
        if self._kept_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(_TOO_LARGE)
        self._let_pieces_gather(len(data))

    def _let_pieces_gather(self, num_bytes: int) -> None:
        """A request that comes byte by byte costs as much each time as one that comes whole."""
        if not self._in_request or num_bytes >= SMALL_PIECE_BYTES or self.flow.read_paused:
            self._num_small_pieces = 0
            return
        self._num_small_pieces += 1
        num_pauses = self._num_small_pieces - NUM_SMALL_PIECES
        if num_pauses > 0 and not self.transport.is_closing():
            self.transport.pause_reading()
            pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(num_pauses - 1, 10))
            self.loop.call_later(pause_s, self._read_on)

    def _read_on(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def on_message_begin(self) -> None:
        self._in_request = self._in_head = True
        if self._timer is None:  # a second one in the same packet
            self._expect()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            raise ValueError("the head is too large")  # for the parser, which goes no further
        self._in_head = False
        self._kept_bytes = 0
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        if self._kept_bytes > MAX_HEAD_BYTES:
            self._refuse(_TOO_LARGE)
        else:
            super().send_400_response(msg)

    def on_body(self, body: bytes) -> None:
        self._kept_bytes = 0
        self._deadline_s += len(body) / MIN_BYTES_PER_S
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_request = False
        self._kept_bytes = 0
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
        if not self.transport.is_closing():
            self._refuse(_TIMEOUT)

    def _refuse(self, answer: bytes) -> None:
        """Close, with an answer unless another one is due or was begun."""
        cycle = self.cycle  # in a head the one of the request before, if there was one
        is_free = cycle is None or (
            cycle.response_complete if self._in_head else not cycle.response_started
        )
        if self._in_request and is_free:
            self.transport.write(answer)
        self.transport.close()


def _without_offer(data: bytes) -> bytes:
    """A packet with the head of a request, without its offer of h2c. Nothing else changes, and no
    length: a body may follow."""
    end = data.find(b"\r\n\r\n")
    head = data if end < 0 else data[:end]
    if b"h2c" not in head.lower():
        return data
    return _OFFER.sub(_HIDDEN, head) + data[len(head) :]
