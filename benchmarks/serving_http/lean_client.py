"""LeanClient: a client for `flexinfer.loadgen` that leaves the cores to the server.

While the load runs it only notes what came and when; events are read afterwards, by the reader of
`flexinfer bench serve`. A connection for each request, plain HTTP, for one event loop.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any
from urllib.parse import urlsplit

import httptools

from flexinfer.loadgen.client import StreamReader, Target, error_message, note_whole
from flexinfer.loadgen.request import LoadRequest, Outcome


class LeanClient:
    """client = LeanClient(target); outcome = await client.send(request); client.read()"""

    def __init__(self, target: Target) -> None:
        self._target = target
        url = urlsplit(target.url)
        self._address = (url.hostname, url.port)
        self._head = (
            f"POST {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: close\r\n"
            "Content-Type: application/json\r\nContent-Length: "
        )
        self._answers: list[tuple[_Answer, Outcome]] = []

    async def send(self, request: LoadRequest) -> Outcome:
        """One request; its outcome says only how long it took before `read`."""
        body = json.dumps(self._target.body(request)).encode()
        message = f"{self._head}{len(body)}\r\n\r\n".encode() + body
        outcome = Outcome(num_prompt_tokens=request.num_prompt_tokens)
        loop = asyncio.get_running_loop()
        start_s = time.perf_counter()
        try:
            transport, answer = await loop.create_connection(
                lambda: _Answer(message, loop.create_future()), *self._address
            )
            self._answers.append((answer, outcome))
            answer.start_s = start_s
            await answer.done
            transport.close()
        except (OSError, httptools.HttpParserError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
        outcome.latency_s = time.perf_counter() - start_s
        return outcome

    def read(self) -> None:
        """Fill the outcomes from what has come."""
        for answer, outcome in self._answers:
            if not outcome.error:
                try:
                    _read(answer, outcome, is_stream=self._target.options.get("stream", True))
                except ValueError as error:
                    outcome.error = f"{type(error).__name__}: {error}"


class _Answer(asyncio.Protocol):
    """Sends a message and notes the pieces of the body that answers it."""

    def __init__(self, message: bytes, done: asyncio.Future[None]) -> None:
        self.done = done
        self.start_s = 0.0
        self.status = 0
        self.pieces: list[tuple[float, bytes]] = []
        """When each came, by `time.perf_counter`."""
        self._message = message
        self._now_s = 0.0
        self._parser: Any = httptools.HttpResponseParser(self)

    def connection_made(self, transport: Any) -> None:
        transport.write(self._message)

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if not self.done.done():
                self.done.set_exception(error)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the server closed the connection"))

    # Called by the parser.

    def on_body(self, body: bytes) -> None:
        self.pieces.append((self._now_s, body))

    def on_message_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if not self.done.done():
            self.done.set_result(None)


def _read(answer: _Answer, outcome: Outcome, *, is_stream: bool) -> None:
    """Raises ValueError for what is no completion."""
    body = b"".join(piece for _, piece in answer.pieces)
    if answer.status != 200:
        outcome.error = f"{answer.status}: {error_message(body.decode(errors='replace'))}"
    elif is_stream:
        _read_stream(answer, outcome)
    else:
        note_whole(json.loads(body), outcome)


def _read_stream(answer: _Answer, outcome: Outcome) -> None:
    reader = StreamReader(outcome, answer.start_s)
    rest = b""
    for now_s, piece in answer.pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and line != b"data: [DONE]" and not outcome.error:
                reader.event(json.loads(line[5:]), now_s)
    if not outcome.error:
        reader.end()
