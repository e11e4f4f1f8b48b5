"""JsonRoute: FastAPI's route with bodies read by pydantic's own JSON parser.

Unlike `json.loads` it refuses what is not Unicode, such as half a surrogate pair: no tokenizer and
no answer could hold that later.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic_core import from_json

from flexinfer.server.http.bodies import LARGE_BYTES, read_large
from flexinfer.server.http.long_lists import models_in, prepare


class JsonRequest(Request):
    kind: type[BaseModel] | None = None
    """What the body is to be."""

    async def json(self) -> Any:
        """Raises JSONDecodeError, APIError. FastAPI validates what it returns at once."""
        text = await self.body()
        try:
            if len(text) <= LARGE_BYTES:
                return from_json(text)
            turnstile = self.app.state.flexinfer.large_bodies
            async with turnstile.reading(self.scope["state"]["tenant"]) as pace:
                return await read_large(text, self.kind, pace)
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from None


class JsonRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        field = self.body_field
        kind = None if field is None else next(models_in(field.field_info.annotation), None)
        if kind is not None:
            prepare(kind)

        async def handle_json(request: Request) -> Response:
            read = JsonRequest(request.scope, request.receive)
            read.kind = kind
            return await handle(read)

        return handle_json
