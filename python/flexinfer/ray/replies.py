"""Reply: a whole answer of a replica's, as it travels."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, NamedTuple

from fastapi.responses import Response
from starlette.types import Message


class Reply(NamedTuple):
    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def response(self) -> Response:
        response = Response(self.body, self.status)
        # Serve's proxy adds the id itself.
        response.raw_headers = [(k, v) for k, v in self.headers if k != b"x-request-id"]
        return response


async def reply_of(answer: AsyncGenerator[Message, None]) -> Reply:
    """All of an answer."""
    start: Message = {}
    body = b""
    async with aclosing(answer) as messages:
        async for message in messages:
            if message["type"] == "http.response.start":
                start = message
            body += message.get("body", b"")
    return Reply(start["status"], tuple((k, v) for k, v in start["headers"]), body)
