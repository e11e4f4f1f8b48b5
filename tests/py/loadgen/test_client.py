"""What the load generator's client measures of an answer, and what it does with errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

aiohttp = pytest.importorskip("aiohttp")
from aiohttp import web

from flexinfer.loadgen.client import Backend, Client, Target
from flexinfer.loadgen.request import LoadRequest, Outcome

# The client, against an endpoint on this machine that says what the test has written down.


@asynccontextmanager
async def endpoint(handler: Any) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    app.router.add_post("/v1/chat/completions", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def streams(*events: Any, end: bytes = b"data: [DONE]\n\n") -> Any:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(end)
        return response

    return handle


def ask(handler: Any, backend: Backend = "openai", options: Any = None) -> Outcome:
    async def run() -> Outcome:
        async with (
            endpoint(handler) as url,
            Client(Target(url, "m", backend, options=options or {})) as client,
        ):
            return await client.send(LoadRequest("hello", 1, 3))

    return asyncio.run(run())


def text(piece: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": piece}]}


def delta(**content: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": content}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}


def test_a_completion_is_measured_by_its_pieces_and_counted_by_the_server() -> None:
    found = ask(streams(text("a"), text("b"), text(""), USAGE))
    assert (found.text, found.error) == ("ab", "")
    assert (found.num_prompt_tokens, found.num_output_tokens) == (7, 3)
    assert len(found.inter_token_s) == 1
    assert found.first_token_s is not None
    assert 0 < found.first_token_s <= found.latency_s


def test_the_first_token_of_a_chat_is_not_its_role() -> None:
    found = ask(streams(delta(role="assistant"), delta(content="hi")), "openai-chat")
    assert (found.text, found.num_output_tokens, found.inter_token_s) == ("hi", 1, [])


def test_tokens_without_text_are_no_failure() -> None:
    found = ask(streams(text(""), text(""), USAGE))
    assert found.is_success
    assert found.num_output_tokens == 3


def test_the_request_says_what_was_asked_for() -> None:
    seen: dict[str, Any] = {}

    async def handle(request: web.Request) -> web.StreamResponse:
        seen.update(await request.json())
        answer: web.StreamResponse = await streams(delta(content="x"))(request)
        return answer

    ask(handle, "openai-chat", {"ignore_eos": True, "temperature": 0.0})
    assert seen == {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0.0,
    }


@pytest.mark.parametrize(
    ("backend", "choice"),
    [("openai", {"text": "abc"}), ("openai-chat", {"message": {"content": "abc"}})],
)
def test_a_whole_answer_is_measured_at_its_end(backend: Backend, choice: dict[str, Any]) -> None:
    seen: dict[str, Any] = {}

    async def handle(request: web.Request) -> web.StreamResponse:
        seen.update(await request.json())
        usage = {"prompt_tokens": 7, "completion_tokens": 3}
        return web.json_response({"choices": [choice], "usage": usage})

    found = ask(handle, backend, {"stream": False})
    assert (found.text, found.num_prompt_tokens, found.num_output_tokens) == ("abc", 7, 3)
    assert (found.first_token_s, found.inter_token_s) == (None, [])
    assert "stream_options" not in seen


def test_a_whole_answer_without_choices_is_a_failure() -> None:
    async def handle(_: web.Request) -> web.StreamResponse:
        return web.json_response({"choices": [], "usage": {}})

    assert "no completion" in ask(handle, options={"stream": False}).error


async def refuses(_: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "full"}}, status=429)


@pytest.mark.parametrize(
    ("handler", "says"),
    [
        (refuses, "429: full"),
        (streams(text("a"), {"error": {"message": "broken"}}), "broken"),
        (streams(end=b"data: [DONE]\n\n"), "without an answer"),
        (streams(end=b"data: {not json\n\n"), "JSONDecodeError"),
    ],
)
def test_failures_are_outcomes(handler: Any, says: str) -> None:
    found = ask(handler)
    assert not found.is_success
    assert says in found.error


def test_nobody_there_is_an_outcome() -> None:
    async def run() -> Outcome:
        async with Client(Target("http://127.0.0.1:9", "m")) as client:
            return await client.send(LoadRequest("hello", 1, 3))

    assert "Connect" in asyncio.run(run()).error
