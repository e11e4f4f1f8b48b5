"""Server-sent events, and what happens when the reader goes away or does not read.

A client that disconnects ends its requests; one that reads nothing for `send_timeout_s` is
disconnected.
What waits for a slow reader is bounded: the engine's outputs are joined (async_llm), and
nothing is made before the socket takes it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import suppress
from json.encoder import encode_basestring
from types import TracebackType
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Message, Receive, Scope, Send

from flexinfer.runtime.panics import panics_as_errors
from flexinfer.server.http.errors import (
    ANTHROPIC_PATH,
    CLIENT_CLOSED_REQUEST,
    APIError,
    as_api_error,
    shaped_body,
)
from flexinfer.server.observability.logs import log_with_request

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Events = AsyncGenerator[str, None]
DONE = "data: [DONE]\n\n"
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
"""Made once: json.dumps makes an encoder at each call that has options."""
_MARK = "\x00text\x00"
STREAMING_RESPONSES: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
"""For the OpenAPI document of a route that also answers with a stream. Without a schema: OpenAPI
3.1 has none for a sequence of events."""


def event(data: Any, name: str | None = None) -> str:
    """One server-sent event with a JSON body."""
    body = f"data: {_encode(data)}\n\n"
    return body if name is None else f"event: {name}\n{body}"


class TextEvents:
    """Events of a stream that differ in nothing but a choice's text: the rest is encoded once."""

    def __init__(self, make: Callable[[int, str], Any]) -> None:
        """`make(index, text)` is an event's body; the text of choice `index` stands in it once."""
        self._make = make
        self._around: dict[int, tuple[str, str]] = {}

    def event(self, index: int, text: str) -> str:
        """The same as `event(make(index, text))`."""
        before, after = self._around.get(index) or self._encode_around(index)
        return f"{before}{encode_basestring(text)}{after}"

    def _encode_around(self, index: int) -> tuple[str, str]:
        before, _, after = event(self._make(index, _MARK)).rpartition(_encode(_MARK))
        self._around[index] = (before, after)
        return before, after


class ClientGoneError(APIError):
    """The caller closed the connection: the answer has no reader."""

    def __init__(self) -> None:
        super().__init__(CLIENT_CLOSED_REQUEST, "the client closed the connection")


async def until_disconnect(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled when the caller goes. Raises ClientGoneError then.

    REQUIRES: the body of the request has been read.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        await _cancel(gone)
        await _cancel(task)


class EventStream(Response):
    """Sends events as they come. Its errors, too, are events: the status is long sent."""

    media_type = "text/event-stream"

    def __init__(self, first: str, rest: Events, send_timeout_s: float, path: str = "") -> None:
        """`first` has been waited for, so that what fails before it is answered by a status."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._send_timeout_s = send_timeout_s
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("http_version") == "1.0":  # it needs a length for every body
            send = _Whole(send)
        sending = asyncio.ensure_future(self._send_all(send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
            else:
                log_with_request(disconnected=True)
        finally:
            await _cancel(gone)
            await _cancel(sending)
            await self._rest.aclose()

    async def _send_all(self, send: Send) -> None:
        headers = [h for h in self.raw_headers if h[0] != b"content-length"]
        start = {"type": "http.response.start", "status": 200, "headers": headers}
        try:
            with _SendTimer(self._send_timeout_s) as timer:
                await timer.watch(send(start))
                await timer.watch(send(_body(self._first, more=True)))
                await self._send_rest(send, timer)
                await timer.watch(send(_body("", more=False)))
        except TimeoutError:
            logger.warning("a client read nothing for %g s: disconnected", self._send_timeout_s)

    async def _send_rest(self, send: Send, timer: _SendTimer) -> None:
        """Runs for each event while the model computes: no more steps than it needs."""
        while True:
            try:
                with panics_as_errors:
                    text = await anext(self._rest)
            except StopAsyncIteration:
                return
            except Exception as error:
                await timer.watch(send(_body(failure_events(error, self._path), more=True)))
                return
            timer.since_s = timer.now_s()
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
            timer.since_s = None


class _Whole:
    """Sends an answer in one piece, with its length, when it is complete."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message = {}
        self._parts: list[bytes] = []

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        self._parts.append(message["body"])
        if not message["more_body"]:
            body = b"".join(self._parts)
            length = (b"content-length", str(len(body)).encode())
            await self._send({**self._start, "headers": [*self._start["headers"], length]})
            await self._send({**message, "body": body})


class _SendTimer:
    """Ends the task when something that it sends is not taken in time.

    One timer for a stream, which looks at the clock now and then: an event costs two assignments.
    """

    def __init__(self, timeout_s: float) -> None:
        self.since_s: float | None = None
        """When the sending began that is under way."""
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self.now_s = self._loop.time
        self._task = asyncio.current_task()
        self._is_late = False

    def __enter__(self) -> _SendTimer:
        self._handle = self._loop.call_later(self._timeout_s, self._look)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Raises TimeoutError in place of the cancellation that this timer asked for."""
        self._handle.cancel()
        if self._is_late and kind is asyncio.CancelledError:
            raise TimeoutError from None

    async def watch(self, sending: Awaitable[None]) -> None:
        self.since_s = self.now_s()
        await sending
        self.since_s = None

    def _look(self) -> None:
        waited_s = 0.0 if self.since_s is None else self.now_s() - self.since_s
        if waited_s < self._timeout_s:
            self._handle = self._loop.call_later(self._timeout_s - waited_s, self._look)
        elif self._task is not None:
            self._is_late = True
            self._task.cancel()


async def start_stream(request: Request, events: Events, send_timeout_s: float) -> EventStream:
    """Waits for the first event: what fails until then raises, and gets a proper status."""
    try:
        first = await until_disconnect(request, anext(events))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events, send_timeout_s, request.url.path)


def failure_events(error: Exception, path: str) -> str:
    """The last events of a stream that fails."""
    known = as_api_error(error)
    if known.code == "internal_error":
        logger.error("a stream has failed", exc_info=error)
    body = shaped_body(known, path)
    return event(body, "error") if path.startswith(ANTHROPIC_PATH) else event(body) + DONE


def _body(text: str, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Future[Any]) -> None:
    """Ends a task and waits until it has cleaned up."""
    if not task.done():
        task.cancel()
        with suppress(BaseException):
            await task
