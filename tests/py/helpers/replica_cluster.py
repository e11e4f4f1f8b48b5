"""Cluster: replicas of this process over one engine, where Serve and its router would be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from typing import Any

import httpx
from starlette.types import Message

from flexinfer.async_llm import AsyncLLM
from flexinfer.ray.calls import Call, ReplicaLostError
from flexinfer.ray.gateway import Gateway
from flexinfer.ray.replica import EngineReplica
from helpers.serving import settings


class Cluster:
    """Of attempt number i only the first `deaths[i]` messages arrive."""

    def __init__(
        self, llm: AsyncLLM, deaths: Sequence[int] = (), names: Sequence[str] = ("a",), **given: Any
    ) -> None:
        self.settings = settings(**given)
        self.replicas = {name: EngineReplica(llm, self.settings, name) for name in names}
        self.deaths = list(deaths)
        self.hanging: set[str] = set()
        self.calls: list[Call] = []
        self.asked: list[str] = []
        """Who was, in turn."""
        self.num_closed = 0
        self.is_hanging = False

    async def forward(self, call: Call) -> AsyncGenerator[Message, None]:
        """To the one that is named, where it is there; else to all in turn."""
        self.calls.append(call)
        names = call.replicas = tuple(sorted(self.replicas))
        chosen = call.replica if call.replica in names else names[len(self.calls) % len(names)]
        self.asked.append(chosen)
        num_left = self.deaths.pop(0) if self.deaths else -1
        try:
            if chosen in self.hanging:
                await asyncio.Event().wait()
            async with aclosing(self.replicas[chosen].answer(call)) as messages:
                async for message in messages:
                    if num_left == 0:
                        raise ReplicaLostError("killed")
                    num_left -= 1
                    yield message
        finally:
            self.num_closed += 1

    async def ask_all(self, method: str, *arguments: Any) -> list[Awaitable[tuple[str, Any]]]:
        if self.is_hanging:
            await asyncio.Event().wait()
        return [self._ask(name, method, arguments) for name in self.replicas]

    async def _ask(self, name: str, method: str, arguments: Sequence[Any]) -> tuple[str, Any]:
        try:
            if name in self.hanging:
                await asyncio.Event().wait()
            answer: tuple[str, Any] = await getattr(self.replicas[name], method)(*arguments)
            return answer
        finally:
            self.num_closed += 1

    def gateway(self) -> Gateway:
        return Gateway(self.forward, self.ask_all, self.settings)

    def client(self, **given: Any) -> httpx.AsyncClient:
        """Of a gateway of its own."""
        transport = httpx.ASGITransport(self.gateway())
        url = "http://127.0.0.1"
        return httpx.AsyncClient(transport=transport, base_url=url, timeout=60, **given)
