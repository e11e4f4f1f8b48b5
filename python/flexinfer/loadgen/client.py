"""Client: sends one request of a load and measures its answer, by aiohttp.

Not thread-safe: for one event loop.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from flexinfer.loadgen.request import LoadRequest, Outcome

Backend = Literal["openai", "openai-chat"]
ENDPOINTS: dict[str, str] = {
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}
MAX_LINE_BYTES = 1 << 22
MAX_ERROR_CHARS = 300
LOOPBACK = {"127.0.0.1", "::1", "localhost"}


@dataclass(frozen=True)
class Target:
    """Where requests go, and what each of them says besides its prompt."""

    base_url: str
    model: str
    backend: Backend = "openai"
    endpoint: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    """Sampling options, as the JSON body takes them; `stream` False asks for whole answers."""

    @property
    def url(self) -> str:
        return self.base_url.rstrip("/") + (self.endpoint or ENDPOINTS[self.backend])

    def body(self, request: LoadRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.num_output_tokens,
            "stream": True,
            **self.options,
        }
        if body["stream"]:
            body.setdefault("stream_options", {"include_usage": True})
        if self.backend == "openai-chat":
            return {**body, "messages": [{"role": "user", "content": request.prompt}]}
        return {**body, "prompt": request.prompt}


class Client:
    """async with Client(target) as client: outcome = await client.send(request)"""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._session: Any = None

    async def __aenter__(self) -> Client:
        import aiohttp

        # No bound on connections or time: the load decides, not the client.
        is_local = urlsplit(self._target.base_url).hostname in LOOPBACK
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, limit_per_host=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
            headers=self._target.headers,
            read_bufsize=MAX_LINE_BYTES,
            trust_env=not is_local,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def send(self, request: LoadRequest) -> Outcome:
        """One request; failures are in the outcome. Times count from here."""
        import aiohttp

        outcome = Outcome(num_prompt_tokens=request.num_prompt_tokens)
        body = self._target.body(request)
        start_s = time.perf_counter()
        try:
            async with self._session.post(self._target.url, json=body) as response:
                if response.status != 200:
                    outcome.error = f"{response.status}: {error_message(await response.text())}"
                elif body["stream"]:
                    await _read_stream(response.content, outcome, start_s)
                else:
                    note_whole(json.loads(await response.read()), outcome)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
        outcome.latency_s = time.perf_counter() - start_s
        return outcome


async def _lines(content: Any) -> AsyncGenerator[bytes, None]:
    """Whole lines as they come: by pieces, as aiohttp's own reading by lines takes twice the time.

    Raises ValueError for a line that is too long.
    """
    rest = b""
    async for piece in content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line
        if len(rest) > MAX_LINE_BYTES:
            raise ValueError(f"a line is longer than {MAX_LINE_BYTES} bytes")
    if rest:
        yield rest


async def _read_stream(content: Any, outcome: Outcome, start_s: float) -> None:
    """Server-sent events of a completion. Raises ValueError for what is none."""
    reader = StreamReader(outcome, start_s)
    async with aclosing(_lines(content)) as lines:
        async for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    break
                reader.event(json.loads(data), time.perf_counter())
                if outcome.error:
                    return
    reader.end()


def note_whole(answer: dict[str, Any], outcome: Outcome) -> None:
    """An answer in one piece: when its tokens came is not known. Raises ValueError for what is
    none."""
    try:
        choice, usage = answer["choices"][0], answer["usage"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        outcome.num_prompt_tokens = usage["prompt_tokens"]
        outcome.num_output_tokens = usage["completion_tokens"]
    except (LookupError, TypeError):
        raise ValueError(f"no completion: {str(answer)[:MAX_ERROR_CHARS]}") from None
    outcome.text = text or ""


def error_message(text: str) -> str:
    """What an error in OpenAI's shape says, or the beginning of the text."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return text[:MAX_ERROR_CHARS]


class StreamReader:
    """Fills an outcome from the events of one stream. Times are those of `time.perf_counter`."""

    def __init__(self, outcome: Outcome, start_s: float) -> None:
        self._outcome = outcome
        self._start_s = start_s
        self._last_s = start_s
        self._first_choice_s: float | None = None
        self._num_pieces = 0
        self._num_tokens: int | None = None

    def event(self, event: dict[str, Any], now_s: float) -> None:
        """It came at `now_s`."""
        outcome = self._outcome
        if error := event.get("error"):
            outcome.error = str(error.get("message", error) if isinstance(error, dict) else error)
            return
        for choice in event.get("choices") or ():
            if self._first_choice_s is None:
                self._first_choice_s = now_s - self._start_s
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            if text:
                self._piece(text, now_s)
        if usage := event.get("usage"):
            outcome.num_prompt_tokens = usage.get("prompt_tokens", outcome.num_prompt_tokens)
            self._num_tokens = usage.get("completion_tokens")

    def end(self) -> None:
        """Of a stream that was complete; tokens without text count by the server's word."""
        outcome = self._outcome
        if outcome.first_token_s is None:
            outcome.first_token_s = self._first_choice_s
        outcome.num_output_tokens = (
            self._num_pieces if self._num_tokens is None else self._num_tokens
        )
        if self._first_choice_s is None:
            outcome.error = "the stream ended without an answer"

    def _piece(self, text: str, now_s: float) -> None:
        outcome = self._outcome
        if outcome.first_token_s is None:
            outcome.first_token_s = now_s - self._start_s
        else:
            outcome.inter_token_s.append(now_s - self._last_s)
        self._last_s = now_s
        self._num_pieces += 1
        outcome.text += text
