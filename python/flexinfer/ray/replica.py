"""EngineReplica: one engine and its server, without a socket: calls come in, messages go out."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message

from flexinfer.async_llm import AsyncLLM
from flexinfer.ray.calls import Call, ReplicaLostError
from flexinfer.server.app import create_app
from flexinfer.server.observability.logs import adopt_transformers, configure_logging

if TYPE_CHECKING:
    from flexinfer.config import EngineConfig
    from flexinfer.server.settings import ServerSettings

logger = logging.getLogger(__name__)

METRICS: dict[str, Any] = {"type": "http", "method": "GET", "path": "/metrics", "query_string": b""}
METRICS |= {"root_path": "", "headers": [], "http_version": "1.1", "scheme": "http"}


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

    task = asyncio.ensure_future(app({**call.scope, "state": {}}, receive, send))
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
    """Without Ray in it: a deployment is made of it, and methods have names that Serve calls."""

    def __init__(self, config: EngineConfig, settings: ServerSettings) -> None:
        configure_logging("text", "info")
        adopt_transformers()
        self.name = f"{socket.gethostname()}:{os.getpid()}"
        self._llm = AsyncLLM.from_engine_args(config)
        self._app = create_app(self._llm, settings)
        threading.Thread(target=self._end_with_engine, name="flexinfer-end", daemon=True).start()

    async def answer(self, call: Call) -> AsyncGenerator[Message, None]:
        """As `answer_of` the app. Raises ReplicaLostError when the engine has died."""
        async with aclosing(answer_of(self._app, call)) as messages:
            async for message in messages:
                self.check_health()
                yield message

    async def metrics(self) -> tuple[str, str]:
        """Who this is, and its numbers in Prometheus' text format."""
        messages = self.answer(Call({**METRICS}, b"", "/metrics"))
        text = b"".join([message.get("body", b"") async for message in messages])
        return self.name, text.decode()

    def check_health(self) -> None:
        """Serve replaces a replica that raises here."""
        if not self._llm.is_running:
            raise ReplicaLostError(f"the engine of {self.name} has died")

    async def record_replica_metadata(self) -> dict[str, int]:
        """What routers are told once."""
        stats = await self._llm.call(lambda engine: engine.stats())
        return {"capacity_tokens": stats.capacity_tokens}

    def _end_with_engine(self) -> None:
        """A process whose engine has failed ends: to routers it would be the one that has least to
        do, until Serve has found its health bad three times."""
        self._llm.join()
        if self._llm.errored:
            logger.critical("%s ends with its engine: Ray starts another replica", self.name)
            os._exit(1)

    async def __del__(self) -> None:
        if hasattr(self, "_app"):
            tracer = self._app.state.flexinfer.tracer
            if tracer is not None:
                await asyncio.to_thread(tracer.shutdown)
            await asyncio.to_thread(self._llm.shutdown)
