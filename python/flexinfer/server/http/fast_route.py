"""FastRoute: a POST endpoint that is called without FastAPI's machinery, for the busy ones.

FastAPI looks for the route twice, resolves dependencies, and validates the answer that we have just
made: a quarter of the HTTP thread's time for a request, which the model lacks. The same endpoint
stands in FastAPI too, for the OpenAPI document and for what is not plain JSON; errors go to the
same handlers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel, ValidationError
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send

from flexinfer.server.http.bodies import LARGE_BYTES, Pace, read_large
from flexinfer.server.http.errors import not_json
from flexinfer.server.http.long_lists import prepare
from flexinfer.server.http.streaming import ClientGoneError

Body = TypeVar("Body", bound=BaseModel)
Endpoint = Callable[[Request, Any, str, Body], Awaitable[Response | BaseModel]]
"""(request, state, tenant, body) -> the answer."""


class FastRoute(BaseRoute, Generic[Body]):
    """`POST path` with a body of JSON. To stand before FastAPI's own routes."""

    def __init__(self, path: str, endpoint: Endpoint[Body], body: type[Body]) -> None:
        self.path = path
        """Also the label of the metrics."""
        self._endpoint = endpoint
        self._body = body
        prepare(body)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] != "http" or scope["path"] != self.path or scope["method"] != "POST":
            return Match.NONE, {}
        return (Match.FULL, {"route": self}) if _is_json(scope) else (Match.NONE, {})

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        text = await _read(receive)
        state, tenant = scope["app"].state.flexinfer, scope["state"]["tenant"]
        if len(text) <= LARGE_BYTES:
            body = self._validated(lambda: self._body.model_validate_json(text))
        else:
            async with state.large_bodies.reading(tenant) as pace:
                read = await self._read_large(text, pace)
                body = self._validated(lambda: self._body.model_validate(read))
        answer = await self._endpoint(Request(scope, receive), state, tenant, body)
        if isinstance(answer, BaseModel):
            answer = Response(answer.model_dump_json(), media_type="application/json")
        await answer(scope, receive, send)

    async def _read_large(self, text: bytes, pace: Pace) -> Any:
        try:
            return await read_large(text, self._body, pace)
        except ValueError as error:
            raise not_json(str(error)) from None

    @staticmethod
    def _validated(validate: Callable[[], Body]) -> Body:
        """Raises RequestValidationError, with fields named as FastAPI names them."""
        try:
            return validate()
        except ValidationError as error:
            found = error.errors(include_url=False)
            for one in found:
                one["loc"] = ("body", *one["loc"])
            raise RequestValidationError(found) from None


def _is_json(scope: Scope) -> bool:
    kind = next((value for key, value in scope["headers"] if key == b"content-type"), b"")
    return kind.partition(b";")[0].strip().lower() == b"application/json"


async def _read(receive: Receive) -> bytes:
    """The whole body. Raises ClientGoneError if the caller goes before its end."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)
