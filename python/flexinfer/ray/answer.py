"""Answer: what the caller of a gateway has got of an answer that replicas give."""

from __future__ import annotations

from starlette.types import Message, Scope, Send

from flexinfer.ray.streams import AnswerStream
from flexinfer.server.http.errors import APIError
from flexinfer.server.http.streaming import failure_events


class Answer:
    """What the caller has got. Nothing is sent before there is some of the body."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.is_begun = False
        self._scope = scope
        self._send = send
        self._start: Message = {}

    async def take(self, message: Message, stream: AnswerStream | None) -> None:
        """A replica's message."""
        if message["type"] == "http.response.start":
            if not self.is_begun:
                # Serve's proxy adds the id itself.
                headers = [(k, v) for k, v in message["headers"] if k != b"x-request-id"]
                self._start = {**message, "headers": headers}
            return
        if stream is not None and self._start["status"] == 200:
            message = {**message, "body": stream.forward(message["body"])}
        if not self.is_begun:
            self.is_begun = True
            await self._send(self._start)
        await self._send(message)

    async def fail(self, error: APIError) -> None:
        """End an answer that is begun. Raises ConnectionError where no event can tell why."""
        if (b"content-type", b"text/event-stream; charset=utf-8") not in self._start["headers"]:
            raise ConnectionAbortedError(error.detail)
        text = failure_events(error, self._scope["path"])
        await self._send({"type": "http.response.body", "body": text.encode(), "more_body": False})
