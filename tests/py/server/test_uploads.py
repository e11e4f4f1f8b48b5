"""Bodies and requests that come fast, or byte by byte: what they may take of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.server import ServerState

from flexinfer.server.http import allowance, connection, limits
from flexinfer.server.http.allowance import Allowance
from flexinfer.server.http.connection import Connection
from flexinfer.server.http.limits import UPLOAD_BYTES_PER_S, BodyLimitMiddleware

MIB = 1 << 20


def test_a_burst_is_free_and_what_comes_after_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(allowance.time, "monotonic", lambda: now_s)
    made = Allowance(per_s=4, burst=8)
    assert [made.delay_s("a", 1) for _ in range(8)] == [0] * 8
    assert made.delay_s("a", 1) == 0.25
    assert made.delay_s("a", 1) == 0.5
    assert made.delay_s("b", 1) == 0  # a tenant of its own
    now_s += 0.5
    assert made.delay_s("a", 1) == 0.25
    now_s += 1000  # rest is not saved beyond a burst
    assert made.delay_s("a", 8) == 0
    assert made.delay_s("a", 1) == 0.25


def test_no_delay_is_longer_than_the_longest_nor_left_for_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(allowance.time, "monotonic", lambda: now_s)
    made = Allowance(per_s=4, burst=8, max_delay_s=3)
    assert made.delay_s("a", 1000) == 3
    now_s += 3
    assert made.delay_s("a", 1) == 0.25


@pytest.mark.parametrize(("num_bytes", "num_waits"), [(256 << 10, 0), (32 * MIB, 24 * 4 - 1)])
def test_a_tenants_body_is_read_at_the_pace_of_all_its_bodies(
    num_bytes: int, num_waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """24 of 32 MiB come after the burst, in pieces of a quarter; after the last none follows."""
    slept_s: list[float] = []
    now_s = 1000.0

    async def sleep(seconds: float) -> None:
        nonlocal now_s
        slept_s.append(seconds)
        now_s += seconds

    monkeypatch.setattr(allowance.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(limits.asyncio, "sleep", sleep)
    left = num_bytes

    async def receive() -> Message:
        nonlocal left
        left -= 256 << 10
        return {"type": "http.request", "body": bytes(256 << 10), "more_body": left > 0}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["more_body"]:
            pass

    async def send(message: Message) -> None:
        raise AssertionError(message)

    scope = {"type": "http", "headers": [], "path": "/", "state": {"tenant": "a"}}
    asyncio.run(BodyLimitMiddleware(app, 64 * MIB)(scope, receive, send))
    assert sum(one > 0 for one in slept_s) == num_waits
    assert sum(slept_s) == pytest.approx(num_waits * (256 << 10) / UPLOAD_BYTES_PER_S)


class Trickle:
    """A connection, and what it asks of its transport and its loop."""

    def __init__(self) -> None:
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.is_reading = True
        transport = SimpleNamespace(
            pause_reading=lambda: setattr(self, "is_reading", False),
            resume_reading=lambda: setattr(self, "is_reading", True),
            is_closing=lambda: False,
            set_protocol=lambda _: None,
            get_extra_info=lambda *_: None,
            write=lambda _: None,
            close=lambda: None,
        )
        loop: Any = asyncio.new_event_loop()
        loop.close()
        clock = SimpleNamespace(
            time=lambda: 0.0,
            call_at=lambda *_: SimpleNamespace(cancel=lambda: None),
            call_later=lambda delay_s, call: self.later.append((delay_s, call)),
            create_task=lambda work: work.close() or asyncio.Future(loop=loop),
        )
        config = Config(app=FastAPI(), log_config=None)
        config.load()
        state = ServerState()
        self.connection = Connection(
            config=config, server_state=state, app_state={}, _loop=clock, receive_timeout_s=30.0
        )
        self.connection.connection_made(transport)  # type: ignore[arg-type]

    def send(self, data: bytes) -> None:
        self.connection.data_received(data)


def test_bytes_that_come_one_by_one_are_left_to_gather() -> None:
    made = Trickle()
    for byte in b"POST":
        made.send(bytes([byte]))
    assert made.is_reading
    pauses_s = []
    for byte in b" /v1/com":
        made.send(bytes([byte]))
        assert not made.is_reading
        pause_s, read_on = made.later.pop()
        pauses_s.append(pause_s)
        read_on()
        assert made.is_reading
    first_s = connection.FIRST_PAUSE_S
    doubled = [first_s * 2.0**i for i in range(8)]
    assert pauses_s == [min(one, connection.MAX_PAUSE_S) for one in doubled]
    made.send(b"p" * connection.SMALL_PIECE_BYTES)  # as a network cuts a long head
    made.send(b"l")
    assert made.is_reading


def test_requests_that_come_whole_let_none_wait() -> None:
    made = Trickle()
    for _ in range(3 * connection.NUM_SMALL_PIECES):
        made.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert not made.later
