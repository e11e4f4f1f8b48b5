"""Gateway: the ASGI app before the replicas. It knows what a request is about, forwards its bytes,
and tries again where a replica has died. Without Ray in it."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flexinfer.ray.calls import Call, ReplicaLostError, prompt_text
from flexinfer.ray.metrics import Pages, ReplicaMetrics
from flexinfer.ray.streams import AnswerStream
from flexinfer.server.http.auth import AuthMiddleware, tenant_salt
from flexinfer.server.http.bodies import Pace, check_size
from flexinfer.server.http.errors import APIError, as_api_error, error_response
from flexinfer.server.http.limits import BodyLimitMiddleware
from flexinfer.server.http.streaming import ClientGoneError, failure_events, until_disconnect
from flexinfer.server.settings import ServerSettings

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 4
"""Replicas that may die of a request, or beside it, until it is answered by 503."""
SENT = (
    *("type", "http_version", "method", "scheme", "path", "raw_path", "root_path"),
    *("query_string", "headers", "client", "server"),
)
"""Of ASGI's scope: the rest cannot travel."""
ONE_MEMORY = "is kept by one server, and replicas do not share it"
LOADS_ONE = "one replica alone would load or forget it: replicas serve no adapters"
REFUSED_PATHS = {
    "/v1/conversations": f"a conversation {ONE_MEMORY}: send the whole chat, its prefix is found",
    "/v1/responses/": f"a stored response {ONE_MEMORY}: keep it where it was received",
    "/v1/load_lora_adapter": LOADS_ONE,
    "/v1/unload_lora_adapter": LOADS_ONE,
    "/admin/": "administration acts on one engine, and there are several here",
}
REFUSED_FIELDS = {
    "conversation": REFUSED_PATHS["/v1/conversations"],
    "previous_response_id": f"a stored response {ONE_MEMORY}: send all of its input instead",
}

END: Message = {"type": "http.response.body", "body": b"", "more_body": False}
CANNOT_GO_ON = (
    "the replica that gave this answer has died, and another cannot go on exactly where it stopped"
)

Forward = Callable[[Call], AsyncGenerator[Message, None]]
"""To some replica. Raises ReplicaLostError."""


class Gateway:
    def __init__(self, forward: Forward, pages: Pages, settings: ServerSettings) -> None:
        """`pages`: the metrics of all replicas."""
        self._forward = forward
        self._metrics = ReplicaMetrics(pages)
        self._checked: ASGIApp = AuthMiddleware(
            BodyLimitMiddleware(self._serve, settings.max_request_bytes), settings.api_keys, None
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        try:
            for path, reason in REFUSED_PATHS.items():
                if scope["path"].startswith(path):
                    raise APIError(403, reason, code="not_with_replicas")
            await self._checked(scope, receive, send)
        except APIError as error:
            await error_response(error, scope["path"])(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/metrics":
            try:
                text = await self._metrics.page()
            except TimeoutError:
                reason = "the replicas cannot be asked for their metrics: Ray does not answer"
                raise APIError(503, reason, code="ray_hangs") from None
            page = Response(text, media_type="text/plain; version=0.0.4")
            await page(scope, receive, send)
            return
        request = Request(scope, receive)
        body = await request.body()
        await check_size(body, Pace())  # before it is read here, beside everybody's streams
        call, fields = _call_of(scope, body)
        stream = AnswerStream.of(scope["path"], fields)
        with suppress(ClientGoneError):
            await until_disconnect(request, self._answer(call, stream, _Answer(scope, send)))

    async def _answer(self, call: Call, stream: AnswerStream | None, answer: _Answer) -> None:
        """Raises APIError while nothing has been sent."""
        for _ in range(MAX_ATTEMPTS):
            if stream is not None:
                call.body = stream.request_body()
            try:
                async with aclosing(self._forward(call)) as messages:
                    async for message in messages:
                        await answer.take(message, stream)
                return
            except ReplicaLostError as error:
                logger.warning("%s: %s", call.scope["path"], error)
                if stream is not None and stream.is_complete:
                    await answer.take(END, stream)
                    return
                if answer.is_begun and (stream is None or not stream.can_go_on):
                    await answer.fail(_lost(CANNOT_GO_ON))
                    return
            except Exception as error:
                if answer.is_begun:
                    raise
                logger.exception("%s cannot be forwarded", call.scope["path"])
                raise as_api_error(error) from None
        failure = _lost(f"{MAX_ATTEMPTS} replicas have died while they had this request")
        if not answer.is_begun:
            raise failure
        await answer.fail(failure)


class _Answer:
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


def _lost(what: str) -> APIError:
    headers = {"Retry-After": "1"}
    return APIError(503, f"{what}: try again", code="replica_lost", headers=headers)


def _call_of(scope: Scope, body: bytes) -> tuple[Call, dict[str, Any]]:
    """The call, and the fields of its body. Raises APIError for what replicas cannot serve."""
    fields: Any = {}
    if scope["method"] == "POST":
        with suppress(ValueError, RecursionError):  # a replica says what is wrong
            fields = json.loads(body)
    if not isinstance(fields, dict):
        fields = {}
    for name, reason in REFUSED_FIELDS.items():
        if fields.get(name):
            raise APIError(400, reason, param=name, code="not_with_replicas")
    salt = fields.get("cache_salt")
    salt = tenant_salt(scope["state"]["tenant"], salt if isinstance(salt, str) else None)
    text = prompt_text(fields) or scope["path"]
    sent = {name: scope[name] for name in SENT if name in scope}
    return Call(sent, body, salt + text, salt), fields


async def _live(receive: Receive, send: Send) -> None:
    """ASGI's lifespan: there is nothing to start or to stop."""
    while True:
        message = await receive()
        await send({"type": message["type"] + ".complete"})
        if message["type"] == "lifespan.shutdown":
            return
