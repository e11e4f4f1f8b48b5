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
from pydantic_core import from_json

from flexinfer.server.http.bodies import check_size


class JsonRequest(Request):
    async def json(self) -> Any:
        """Raises JSONDecodeError, APIError. FastAPI validates what it returns at once."""
        text = await self.body()
        state = self.app.state.flexinfer
        await state.large_bodies.enter(self.scope["state"]["tenant"], len(text))
        check_size(text)
        try:
            return from_json(text)
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from None


class JsonRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json
