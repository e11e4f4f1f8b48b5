"""Administration: `/admin` where there are several engines. One that is named (`?replica=NAME`) is
asked alone; else whoever answers shows its memory, and what changes an engine changes all.

Nobody waits longer for a replica that hangs than is said here.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs

from fastapi.responses import JSONResponse, Response

from flexinfer.ray.calls import Call, Forward, ReplicaLostError
from flexinfer.ray.replies import Reply, reply_of
from flexinfer.ray.roll_call import Heard, RollCall
from flexinfer.server.http.errors import APIError, bad_request, error_body

LOOK_TIMEOUT_S = 5.0
"""To show something."""
CHANGE_TIMEOUT_S = 60.0
"""To change something: a budget waits for a step, and swaps."""
LOOKS = ("GET", "HEAD", "OPTIONS")


class Administration:
    def __init__(self, forward: Forward, replicas: RollCall) -> None:
        self._forward = forward
        self._replicas = replicas

    async def answer(self, call: Call) -> Response:
        """Raises APIError for a replica that does not answer, TimeoutError where Ray does not."""
        call.replica = _named(call.scope["query_string"])
        if call.replica is None and call.scope["method"] not in LOOKS:
            return await self._all(call)
        if call.replica is not None:
            return (await self._one(call)).response()
        with suppress(APIError):
            return (await self._one(call)).response()
        return (await self._first(call)).response()

    async def _one(self, call: Call) -> Reply:
        """Of the replica that is named; of the one that the router chooses, if none is."""
        is_look = call.scope["method"] in LOOKS
        seconds = LOOK_TIMEOUT_S if is_look else CHANGE_TIMEOUT_S
        try:
            return await asyncio.wait_for(reply_of(self._forward(call)), seconds)
        except TimeoutError:
            raise _silent(call.replica or "that was asked", seconds, is_look=is_look) from None
        except ReplicaLostError as error:
            raise APIError(503, f"{error}: try again", code="replica_lost") from None

    async def _first(self, call: Call) -> Reply:
        """Of whoever is the first of all: the one that was chosen has not answered."""
        asked = [
            asyncio.ensure_future(self._one(dataclasses.replace(call, replica=name)))
            for name in call.replicas
        ]
        try:
            for answer in asyncio.as_completed(asked):
                with suppress(APIError):
                    return await answer
        finally:
            for one in asked:
                one.cancel()
        raise APIError(503, "no replica has shown it: try again", code="replica_silent")

    async def _all(self, call: Call) -> Response:
        heard: Heard[Reply] = await self._replicas.ask(CHANGE_TIMEOUT_S, "reply", call)
        replies, silent = heard
        for reply in replies.values():
            if 300 <= reply.status < 400:  # to another path: all say so
                return reply.response()
        told: dict[str, Any] = {name: reply.json for name, reply in replies.items()}
        status = max((reply.status for reply in replies.values()), default=200)
        for name in silent:
            error = _silent(f"{name} has died, or", CHANGE_TIMEOUT_S, is_look=False)
            status = error.status_code
            told[name] = error.body
        body = {"object": "replicas", "replicas": told}
        return JSONResponse(body if status < 400 else {**_failure(status, told), **body}, status)


def _named(query: bytes) -> str | None:
    """Raises APIError for several. An empty name is one that no replica has: `?replica=$NAME` of a
    shell that knows no NAME is not to change all."""
    names = parse_qs(query.decode("latin-1"), keep_blank_values=True).get("replica", [])
    if len(names) > 1:
        raise bad_request("replica is given more than once: name one, or none for all", "replica")
    return names[0] if names else None


def _failure(status: int, told: Mapping[str, Any]) -> dict[str, Any]:
    """In the shape of all errors, what those say that have not done it."""
    failed = {name: body["error"] for name, body in told.items() if "error" in body}
    words = "; ".join(f"{name}: {error['message']}" for name, error in failed.items())
    first = next(iter(failed.values()))
    message = f"{len(failed)} of {len(told)} replicas have not done it: {words}"
    return error_body(status, message, first["param"], first["code"])


def _silent(name: str, seconds: float, *, is_look: bool) -> APIError:
    rest = "" if is_look else "; it may still do what it was asked for"
    what = f"the replica {name} has not answered within {seconds:g} s{rest}"
    return APIError(503, what, code="replica_silent", headers={"Retry-After": "1"})
