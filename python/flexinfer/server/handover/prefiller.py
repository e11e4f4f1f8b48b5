"""Prefiller: computes prompts for servers that decode, and hands their KV over.

    decoding server                                   prefilling server
    {"prefill": [tokens], salt, model, ...}   -->     checked before any work
                                              <--     {"accepted": true} or {"refused": "why"}
                                                      the prompt runs like any other request
                                              <--     the delivery, with its files, or where the
                                                      group meets that it goes through

One connection a prompt. Who asks and goes away ends its prefill. For one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from itertools import count
from typing import Any, TypeVar

from flexinfer.async_llm import AsyncLLM
from flexinfer.engine.handover import EngineHandover
from flexinfer.errors import EngineError, HandoverError, OutOfMemoryError, RequestError
from flexinfer.handover.channel import Channel, close_files
from flexinfer.handover.parcels import Identity
from flexinfer.sampling.params import RequestOutputKind, SamplingParams
from flexinfer.server.handover.endpoints import Endpoint
from flexinfer.server.handover.stats import HandoverStats
from flexinfer.types import TokensPrompt

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

MESSAGE_TIMEOUT_S = 5.0
"""For one message from or to a process that has connected."""
NUM_THREADS = 8
"""Most messages that are read or written, and exports that are made, at a time."""
PREFILL = SamplingParams(
    temperature=0, max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
)
"""The token behind the prompt is drawn from logits that come with it, and left out: the receiver
draws it, where the request's sampling is known."""


class Prefiller:
    """Listens while `serving`; refuses more than as many prompts as may run at once."""

    def __init__(self, llm: AsyncLLM, endpoint: Endpoint) -> None:
        self.stats = HandoverStats()
        self._llm = llm
        self._endpoint = endpoint
        self._threads = ThreadPoolExecutor(NUM_THREADS, "flexinfer-handover")
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = count()
        self._num_active = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Raises OSError or ValueError where it cannot listen, or its KV cannot go that way."""
        handover = await self._llm.call(lambda engine: engine.handover)
        await self._in_thread(lambda: handover.identity)  # reads files, once: not when it is asked
        self._endpoint.layout(handover)
        listener = self._endpoint.listen()
        accepting = asyncio.ensure_future(self._accept(listener, handover))
        try:
            yield
        finally:
            for task in (accepting, *self._tasks):
                task.cancel()
            await asyncio.gather(accepting, *self._tasks, return_exceptions=True)
            listener.close()
            self._endpoint.leave()
            self._threads.shutdown(wait=False)

    async def _accept(self, listener: socket.socket, handover: EngineHandover) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:  # no file is left to open: some will be
                logger.warning("a decoding server cannot be answered", exc_info=True)
                await asyncio.sleep(0.1)
                continue
            task = asyncio.ensure_future(self._answer(connection, handover))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, connection: socket.socket, handover: EngineHandover) -> None:
        with connection:
            try:
                accept = self._endpoint.accept
                channel = await self._in_thread(accept, connection, MESSAGE_TIMEOUT_S)
            except HandoverError as error:
                logger.warning("who asks for a prefill is not answered: %s", error)
                return
            try:
                try:
                    await self._serve(channel, handover)
                except (HandoverError, OutOfMemoryError, RequestError, EngineError) as error:
                    await self._in_thread(channel.send, {"refused": str(error)})
            except HandoverError as error:
                logger.info("a decoding server has gone: %s", error)
            except Exception:
                logger.exception("a prompt could not be prefilled for another server")

    async def _serve(self, channel: Channel, handover: EngineHandover) -> None:
        header, files = await self._in_thread(channel.receive)
        close_files(files)
        handover.check()
        prompt = _prompt_of(header)
        handover.identity.check(Identity(str(header.get("model")), str(header.get("tokenizer"))))
        if header.get("layout") != self._endpoint.layout(handover):
            raise HandoverError("heads, dtype, layers per plane or chunk_bytes differ")
        if self._num_active >= self._llm.config.max_num_seqs:
            raise HandoverError(f"{self._num_active} prompts are being prefilled already")
        request_id = f"handover-{next(self._numbers)}"
        self._num_active += 1
        try:
            await self._in_thread(channel.send, {"accepted": True})
            if not await self._prefill(prompt, request_id, channel):
                return
            given = await self._in_thread(self._endpoint.give, handover, prompt)
        finally:
            self._num_active -= 1
            await self._llm.call(lambda engine: engine.handover.let_go(request_id))
        if given is None:
            raise HandoverError("the prompt's KV was evicted before it could be sent")
        await self._in_thread(given.send, channel)
        self.stats.parcels_sent += 1
        self.stats.bytes_sent += given.num_bytes
        self.stats.chunks_copied += given.num_copied

    async def _prefill(self, prompt: TokensPrompt, request_id: str, channel: Channel) -> bool:
        """False: nobody waits for it any more."""
        loop = asyncio.get_running_loop()
        has_gone: asyncio.Future[None] = loop.create_future()
        loop.add_reader(channel.fileno(), has_gone.cancel)
        running = asyncio.ensure_future(self._run(prompt, request_id))
        try:
            await asyncio.wait({has_gone, running}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                return False
            running.result()
            return True
        finally:
            loop.remove_reader(channel.fileno())
            running.cancel()

    async def _run(self, prompt: TokensPrompt, request_id: str) -> None:
        async with aclosing(self._llm.generate(prompt, PREFILL, request_id)) as outputs:
            (final,) = [output async for output in outputs]
        (completion,) = final.outputs
        if completion.finish_reason in ("abort", "error"):
            raise HandoverError(f"the prompt could not be computed: {completion.stop_reason}")

    async def _in_thread(self, function: Callable[..., Result], *arguments: Any) -> Result:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, function, *arguments)


def _prompt_of(header: dict[str, Any]) -> TokensPrompt:
    """What is checked of it when it is queued is not checked here."""
    tokens, salt = header.get("prefill"), header.get("salt")
    if not isinstance(tokens, list) or not isinstance(salt, str):
        raise HandoverError("the message asks for no prefill")
    return {"prompt_token_ids": tokens, "cache_salt": salt}
