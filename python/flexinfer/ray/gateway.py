"""Gateway: the ASGI app before the replicas. It knows what a request is about, forwards its bytes,
and tries again where a replica has died. Without Ray in it."""

from __future__ import annotations

import logging
from contextlib import aclosing, suppress
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from pydantic_core import from_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flexinfer.ray.administration import Administration
from flexinfer.ray.answer import Answer
from flexinfer.ray.calls import Call, Forward, ReplicaLostError, prompt_text
from flexinfer.ray.kept import keeper_of
from flexinfer.ray.metrics import metrics_of
from flexinfer.ray.roll_call import AskAll, RollCall
from flexinfer.ray.streams import AnswerStream
from flexinfer.server.http.auth import ENGINE_PATHS, AuthMiddleware, tenant_salt
from flexinfer.server.http.bodies import Pace, check_size
from flexinfer.server.http.errors import APIError, as_api_error, error_response
from flexinfer.server.http.limits import BodyLimitMiddleware
from flexinfer.server.http.streaming import ClientGoneError, until_disconnect
from flexinfer.server.settings import ServerSettings

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 4
"""Replicas that may die of a request, or beside it, until it is answered by 503."""
SENT = (
    *("type", "http_version", "method", "scheme", "path", "raw_path", "root_path"),
    *("query_string", "headers", "client", "server"),
)
"""Of ASGI's scope: the rest cannot travel."""
REFUSED_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
LOADS_ONE = (
    "one replica alone would load or forget it: name adapters at the start, with --lora-modules"
)
END: Message = {"type": "http.response.body", "body": b"", "more_body": False}
CANNOT_GO_ON = (
    "the replica that gave this answer has died, and another cannot go on exactly where it stopped"
)
KEPT_THERE = (
    "the replica that keeps what this request names was lost while it had the request. If it has "
    "died, what it kept is gone, and further requests are told so by 404"
)


class Gateway:
    """Keeps nothing but the streams under way: another one in its place goes on as it did."""

    def __init__(self, forward: Forward, ask_all: AskAll, settings: ServerSettings) -> None:
        self._forward = forward
        self._replicas = RollCall(ask_all)
        self._administration = Administration(forward, self._replicas)
        self._adapters = frozenset(module.name for module in settings.lora_modules)
        limited = BodyLimitMiddleware(self._serve, settings.max_request_bytes)
        self._checked: ASGIApp = AuthMiddleware(limited, settings.api_keys, settings.admin_api_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        try:
            if scope["path"].startswith(REFUSED_PATHS):
                raise APIError(403, LOADS_ONE, code="not_with_replicas")
            await self._checked(scope, receive, send)
        except APIError as error:
            await error_response(error, scope["path"])(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            if scope["path"] == "/metrics":
                text = await metrics_of(self._replicas)
                page = Response(text, media_type="text/plain; version=0.0.4")
                await page(scope, receive, send)
                return
            call, fields = self._call_of(scope, await _body_of(request))
            if scope["path"].startswith(ENGINE_PATHS):
                told = await self._administration.answer(call)
                await told(scope, receive, send)
                return
        except TimeoutError:
            reason = "the replicas cannot be asked: Ray does not answer"
            raise APIError(503, reason, code="ray_hangs") from None
        stream = AnswerStream.of(scope["path"], fields)
        with suppress(ClientGoneError):
            await until_disconnect(request, self._answer(call, stream, Answer(scope, send)))

    def _call_of(self, scope: Scope, body: bytes) -> tuple[Call, dict[str, Any]]:
        """The call, and the fields of its body."""
        fields: Any = {}
        if scope["method"] == "POST":
            with suppress(ValueError):  # a replica, which reads it so too, says what is wrong
                fields = from_json(body)
        if not isinstance(fields, dict):
            fields = {}
        salt = fields.get("cache_salt")
        tenant = scope.get("state", {}).get("tenant", "")  # none of OPTIONS, which needs no key
        salt = tenant_salt(tenant, salt if isinstance(salt, str) else None)
        model = fields.get("model")
        if isinstance(model, str) and model in self._adapters:
            salt = f"lora/{model}/{salt}"  # its KV is another
        text = prompt_text(fields) or scope["path"]
        sent = {name: scope[name] for name in SENT if name in scope}
        return Call(sent, body, salt + text, salt, keeper_of(scope["path"], fields)), fields

    async def _answer(self, call: Call, stream: AnswerStream | None, answer: Answer) -> None:
        """Raises APIError while nothing has been sent."""
        for _ in range(MAX_ATTEMPTS):
            try:
                await self._attempt(call, stream, answer)
                return
            except ReplicaLostError as error:
                logger.warning("%s: %s", call.scope["path"], error)
            if stream is not None and stream.is_complete:
                await answer.take(END, stream)
                return
            if call.replica is not None:  # it may have been done, and no other can do it
                failure = APIError(503, KEPT_THERE, code="replica_lost")
                break
            if answer.is_begun and (stream is None or not stream.can_go_on):
                failure = _lost(CANNOT_GO_ON)
                break
        else:
            failure = _lost(f"{MAX_ATTEMPTS} replicas have died while they had this request")
        if not answer.is_begun:
            raise failure
        await answer.fail(failure)

    async def _attempt(self, call: Call, stream: AnswerStream | None, answer: Answer) -> None:
        """Raises ReplicaLostError, and APIError while nothing has been sent."""
        if stream is not None:
            call.body = stream.request_body()
        try:
            async with aclosing(self._forward(call)) as messages:
                async for message in messages:
                    await answer.take(message, stream)
        except (ReplicaLostError, APIError):
            raise
        except Exception as error:
            if answer.is_begun:
                raise
            logger.exception("%s cannot be forwarded", call.scope["path"])
            raise as_api_error(error) from None


async def _body_of(request: Request) -> bytes:
    body = await request.body()
    await check_size(body, Pace())  # before it is read here, beside everybody's streams
    return body


def _lost(what: str) -> APIError:
    headers = {"Retry-After": "1"}
    return APIError(503, f"{what}: try again", code="replica_lost", headers=headers)


async def _live(receive: Receive, send: Send) -> None:
    """ASGI's lifespan: there is nothing to start or to stop."""
    while True:
        message = await receive()
        await send({"type": message["type"] + ".complete"})
        if message["type"] == "lifespan.shutdown":
            return
