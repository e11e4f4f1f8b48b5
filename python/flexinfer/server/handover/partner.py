"""PrefillPartner: has prompts computed by a server that prefills, and adopts their KV.

Nothing that the partner does or leaves undone reaches a client: what it does not bring in time is
computed here. It is asked for all of a prompt but the last token, which is computed here: its
logits, and the first token of the answer, are wanted where the request's sampling is known. For
one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any

from flexinfer.async_llm import AsyncLLM
from flexinfer.engine.handover import EngineHandover
from flexinfer.engine.llm_engine import LLMEngine
from flexinfer.errors import EngineError, HandoverError, OutOfMemoryError
from flexinfer.handover.channel import Channel, ChannelTimeoutError, close_files
from flexinfer.server.handover.endpoints import Endpoint, Taken
from flexinfer.server.handover.stats import HandoverStats
from flexinfer.types import TokensPrompt

logger = logging.getLogger(__name__)

ACCEPT_TIMEOUT_S = 2.0
"""A partner that is alive says within this time whether it will prefill a prompt."""
MAX_BACKOFF_S = 30.0
"""How long a partner that was slow several times is not asked, at most."""


class PrefillPartner:
    """The server that listens at `endpoint`, whether it is there or not."""

    def __init__(
        self, llm: AsyncLLM, endpoint: Endpoint, timeout_s: float, min_tokens: int
    ) -> None:
        """timeout_s: for one prompt. min_tokens: fewer that are not cached are computed here."""
        self.stats = HandoverStats()
        self._llm = llm
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._min_tokens = min_tokens
        self._threads = ThreadPoolExecutor(llm.config.max_num_seqs, "flexinfer-handover")
        self._backoff_s = 0.0
        self._avoided_until = 0.0

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    @asynccontextmanager
    async def prefilled(self, prompt: TokensPrompt, request_id: str) -> AsyncIterator[None]:
        """Within it, the request finds what the partner has computed, if that went well."""
        is_kept = await self._have_prefilled(prompt, request_id)
        try:
            yield
        finally:
            if is_kept:
                with suppress(EngineError):
                    await self._llm.call(lambda engine: engine.handover.let_go(request_id))

    async def _have_prefilled(self, prompt: TokensPrompt, request_id: str) -> bool:
        reason = "lost"
        error: Exception
        try:
            question = await self._question(prompt)
            if question is None:
                return False
            if time.monotonic() < self._avoided_until:
                self.stats.failures["avoided"] += 1
                return False
            taken = await self._fetch(*question)
            reason = "unfit"
            # What nobody adopts goes with its last reference: closing it elsewhere could meet this.
            num_bytes = await self._llm.call(lambda e: taken.adopt(e.handover, request_id))
            self._backoff_s = 0.0
            self.stats.parcels_adopted += 1
            self.stats.bytes_adopted += num_bytes
            self.stats.tokens_adopted += len(taken.tokens)
            return True
        except _PartnerError as failure:
            reason, error = failure.reason, failure
        except (ChannelTimeoutError, TimeoutError) as failure:
            reason, error = "slow", failure
            self._backoff_s = min(MAX_BACKOFF_S, max(1.0, 2 * self._backoff_s))
            self._avoided_until = time.monotonic() + self._backoff_s
        except OutOfMemoryError as failure:
            reason, error = "no room", failure
        except (HandoverError, OSError) as failure:
            error = failure
        except EngineError:
            return False  # the request will meet it
        self.stats.failures[reason] += 1
        logger.warning("a prompt is prefilled here: %s: %s", reason, error)
        return False

    async def _question(self, prompt: TokensPrompt) -> tuple[EngineHandover, dict[str, Any]] | None:
        """Who takes the answer, and what to ask; None: too little of the prompt has to be computed.
        Raises OutOfMemoryError where the answer would find no room."""
        output_ids = prompt.get("output_token_ids") or ()
        tokens = [*prompt["prompt_token_ids"], *output_ids][:-1]
        salt = prompt.get("cache_salt") or ""
        if len(tokens) < self._min_tokens:
            return None

        def prepare(engine: LLMEngine) -> EngineHandover | None:
            if _num_missing(engine, tokens, salt) < self._min_tokens:
                return None
            self._endpoint.prepare(engine.handover, len(tokens))
            return engine.handover

        handover = await self._llm.call(prepare)
        if handover is None:
            return None
        identity = await asyncio.to_thread(lambda: handover.identity)  # reads files, once
        return handover, {
            "prefill": tokens,
            "salt": salt,
            "model": identity.model,
            "tokenizer": identity.tokenizer,
            "layout": self._endpoint.layout(handover),
        }

    async def _fetch(self, handover: EngineHandover, ask: dict[str, Any]) -> Taken:
        """Raises HandoverError, TimeoutError; the thread that waits is ended in any case."""
        loop = asyncio.get_running_loop()
        exchange = _Exchange(self._endpoint, handover, ask, self._timeout_s)
        waiting = loop.run_in_executor(self._threads, exchange.run)
        try:
            return await asyncio.wait_for(asyncio.shield(waiting), self._timeout_s)
        except BaseException:
            exchange.interrupt()
            waiting.add_done_callback(_close_late)
            raise


class _Exchange:
    """One question and its answer, in a thread of its own."""

    def __init__(
        self, endpoint: Endpoint, handover: EngineHandover, ask: dict[str, Any], timeout_s: float
    ) -> None:
        self._endpoint = endpoint
        self._handover = handover
        self._ask = ask
        self._timeout_s = timeout_s
        self._channel: Channel | None = None
        self._is_over = False

    def run(self) -> Taken:
        deadline = time.monotonic() + self._timeout_s
        try:
            channel = self._endpoint.connect(min(ACCEPT_TIMEOUT_S, self._timeout_s))
        except ChannelTimeoutError:
            raise
        except HandoverError as error:
            raise _PartnerError("unreachable", str(error)) from None
        with channel:
            self._channel = channel
            if self._is_over:
                raise ChannelTimeoutError("nobody waits any more")
            channel.send(self._ask)
            answer, files = channel.receive()
            close_files(files)
            _check(answer, "accepted")
            channel.set_timeout(max(0.001, deadline - time.monotonic()))
            header, files = channel.receive()
            if "refused" in header:
                close_files(files)
                _check(header, "")
            taken = self._endpoint.take(channel, header, files, self._handover)
        if taken.salt != self._ask["salt"]:
            taken.close()
            raise HandoverError("the partner sent the KV of another tenant")
        if self._ask["prefill"][: len(taken.tokens)] != list(taken.tokens):
            taken.close()
            raise HandoverError("the partner sent the KV of another prompt")
        return taken

    def interrupt(self) -> None:
        """From any thread."""
        self._is_over = True
        if self._channel is not None:
            self._channel.interrupt()


class _PartnerError(HandoverError):
    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def _num_missing(engine: LLMEngine, tokens: list[int], salt: str) -> int:
    """Tokens that would have to be computed; 0 while it sleeps: its requests wait anyway."""
    if engine.is_sleeping():
        return 0
    return len(tokens) - engine.handover.num_usable(tokens, salt)


def _check(answer: dict[str, Any], wanted: str) -> None:
    if "refused" in answer:
        raise _PartnerError("refused", str(answer["refused"]))
    if wanted not in answer:
        raise HandoverError("the partner does not speak this protocol")


def _close_late(waiting: asyncio.Future[Taken]) -> None:
    """What came when nobody waited any more goes back."""
    if not waiting.cancelled() and waiting.exception() is None:
        waiting.result().close()
