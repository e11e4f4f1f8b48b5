"""EngineReplica: one engine and its server, without a socket: calls come in, messages go out."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message

from flexinfer.async_llm import AsyncLLM
from flexinfer.ray.calls import Call, ReplicaLostError
from flexinfer.ray.replies import Reply, reply_of
from flexinfer.server.app import create_app
from flexinfer.server.http.auth import ENGINE_PATHS
from flexinfer.server.http.errors import APIError, error_response

if TYPE_CHECKING:
    from flexinfer.server.settings import ServerSettings

METRICS: dict[str, Any] = {"type": "http", "method": "GET", "path": "/metrics", "query_string": b""}
METRICS |= {"root_path": "", "headers": [], "http_version": "1.1", "scheme": "http"}
PROCESS = """\
# HELP flexinfer:replica_process The process of this replica.
# TYPE flexinfer:replica_process gauge
flexinfer:replica_process{host="%s",pid="%d"} 1
"""


async def answer_of(app: ASGIApp, call: Call) -> AsyncGenerator[Message, None]:
    """ASGI's messages of the answer. Closing it, or cancelling, ends what was asked for."""
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    body: Message | None = {"type": "http.request", "body": call.body, "more_body": False}
    gone = asyncio.Event()

    async def receive() -> Message:
        nonlocal body
        if body is not None:
            message, body = body, None
            return message
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        messages.put_nowait(message)

    state = {"replicas": call.replicas}
    task = asyncio.ensure_future(app({**call.scope, "state": state}, receive, send))
    task.add_done_callback(lambda _: messages.put_nowait(None))
    try:
        while (message := await messages.get()) is not None:
            yield message
    finally:
        gone.set()
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):  # answered by 500 and logged already
            await task


class EngineReplica:
    """Without Ray in it. Some methods have names that Serve calls."""

    def __init__(self, llm: AsyncLLM, settings: ServerSettings, name: str) -> None:
        """`name`: among the replicas; one that takes its place has another."""
        self.name = name
        self._llm = llm
        self._app = create_app(llm, settings, name)
        adapters = self._app.state.flexinfer.adapters.load_all(settings.lora_modules)
        with ThreadPoolExecutor(1) as pool:  # this thread may have a loop already
            pool.submit(asyncio.run, adapters).result()

    async def answer(self, call: Call) -> AsyncGenerator[Message, None]:
        """As `answer_of` the app. Raises ReplicaLostError when the engine has died."""
        async with aclosing(answer_of(self._app_for(call), call)) as messages:
            async for message in messages:
                self.check_health()
                if message["type"] == "http.response.start":
                    headers = [*message["headers"], (b"x-replica", self.name.encode())]
                    message = {**message, "headers": headers}
                yield message

    async def reply(self, call: Call) -> tuple[str, Reply]:
        """Who this is, and the whole of its answer."""
        return self.name, await reply_of(self.answer(call))

    async def metrics(self) -> tuple[str, str]:
        """Who this is, and its numbers in Prometheus' text format."""
        _, page = await self.reply(Call({**METRICS}, b"", "/metrics"))
        return self.name, page.body.decode() + PROCESS % (socket.gethostname(), os.getpid())

    def check_health(self) -> None:
        """Serve replaces a replica that raises here."""
        if not self._llm.is_running:
            raise ReplicaLostError(f"the engine of {self.name} has died")

    async def record_replica_metadata(self) -> dict[str, int]:
        """What routers are told once."""
        stats = await self._llm.call(lambda engine: engine.stats())
        return {"capacity_tokens": stats.capacity_tokens}

    def _app_for(self, call: Call) -> ASGIApp:
        """What answers it here: where another replica is named and has gone, that there is no such
        thing; administration of it would change the wrong one."""
        path = call.scope["path"]
        if call.replica in (None, self.name):
            return self._app
        if call.replica in call.replicas:
            reason = (
                f"this was sent to the replica {self.name}, and named {call.replica}: try again"
            )
            return error_response(APIError(503, reason, code="wrong_replica"), path)
        if not path.startswith(ENGINE_PATHS):
            return self._app
        known = ", ".join(call.replicas)
        reason = f"there is no replica {call.replica!r}; there are: {known}"
        return error_response(APIError(404, reason, param="replica", code="no_such_replica"), path)
