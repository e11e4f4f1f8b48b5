"""Large bodies: what one may hold, and what is left of the event loop beside them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from flexinfer.cli.settings import SHIPPED_MODEL
from flexinfer.server.http import bodies
from flexinfer.server.http.bodies import Turnstile, check_size
from flexinfer.server.http.errors import APIError

HELLO = {"role": "user", "content": "hello"}
JSON = {"content-type": "application/json"}
KINDS = ["application/json", "application/x+json"]
"""The second way leads through FastAPI."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text"}] * 17_000}]},
            "17004 objects and lists, of at most 16384",
        ),
        (
            "/v1/chat/completions",
            {"messages": [HELLO], "chat_template_kwargs": {"a": [[]] * 20_000}},
            "objects and lists",
        ),
        ("/v1/completions", {"prompt": [[1]] * 20_000}, "objects and lists"),
        ("/v1/completions", {"prompt": [1] * 300_000}, "300001 values, of at most 262144"),
        ("/v1/responses", {"input": "a", "tools": [{"name": "f"}] * 20_000}, "objects and lists"),
        ("/v1/conversations", {"metadata": {str(i): "a" for i in range(300_000)}}, "texts"),
        ("/tokenize", {"prompt": "a", "zz": [[]] * 20_000}, "objects and lists"),
    ],
)
def test_more_json_than_the_loop_reads_in_a_moment_is_refused(
    path: str, body: dict[str, Any], says: str, kind: str, http: httpx.Client
) -> None:
    answer = http.post(path, content=json.dumps(body), headers={"content-type": kind})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert says in error["message"]
    assert error["code"] == "request_too_large"


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"a": '[{"\\' * 40_000}),
        json.dumps({"a": ["[,", "\\", '"', '\\"[' * 10_000] * 4000}),
    ],
)
def test_what_stands_in_texts_does_not_count(text: str) -> None:
    check_size(text.encode())


def test_one_long_text_is_not_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """That held the event loop for 17 ms at 7 MiB."""
    parted: list[bytes] = []
    monkeypatch.setattr(bodies, "_outside_of_texts", lambda text: parted.append(text) or b"")
    check_size(json.dumps({"metadata": {"a": "x" * 1_000_000}}).encode())
    assert not parted
    check_size(json.dumps({"a": "[" * 20_000}).encode())
    assert len(parted) == 1


def test_very_many_texts_are_not_even_parted() -> None:
    with pytest.raises(APIError, match="texts"):
        check_size(b'[""' + b',""' * 600_000 + b"]")


def test_between_large_bodies_of_a_tenant_others_have_the_loop() -> None:
    async def run() -> tuple[list[str], list[float]]:
        turnstile, order, entered = Turnstile(), [], []
        now_s = 0.0
        loop = asyncio.get_running_loop()
        later: list[tuple[float, Any]] = []
        loop.time = lambda: now_s  # type: ignore[method-assign]
        loop.call_later = (  # type: ignore[method-assign]
            lambda delay, call, *_: later.append((delay, call))
        )

        async def read(tenant: str) -> None:
            nonlocal now_s
            await turnstile.enter(tenant, bodies.LARGE_BYTES + 1)
            order.append(tenant)
            entered.append(now_s)
            now_s += 0.5  # reading it takes so long

        tasks = [asyncio.ensure_future(read(tenant)) for tenant in ("a", "a", "b")]
        for _ in range(5):
            await asyncio.sleep(0)
        assert order == ["a", "b"]
        (delay, release), *_ = later
        assert delay >= bodies.REST * 0.5
        release()
        await asyncio.gather(*tasks)
        return order, entered

    order, entered = asyncio.run(run())
    assert order == ["a", "b", "a"]
    assert entered == sorted(entered)


def test_small_bodies_wait_for_nobody() -> None:
    async def run() -> None:
        turnstile = Turnstile()
        await turnstile.enter("a", 1 << 20)
        await turnstile.enter("a", 100)

    asyncio.run(run())


def test_a_tenants_grammars_are_compiled_one_by_one_and_no_others_wait() -> None:
    async def run() -> list[str]:
        turnstile, order = Turnstile(), []
        compiled = {name: asyncio.Event() for name in ("a1", "a2", "b1")}

        async def compile_one(name: str) -> None:
            async with turnstile.turn(name[0]):
                order.append(name)
                await compiled[name].wait()

        tasks = [asyncio.ensure_future(compile_one(name)) for name in compiled]
        await asyncio.sleep(0)
        assert order == ["a1", "b1"]
        for event in compiled.values():
            event.set()
        await asyncio.gather(*tasks)
        return order

    assert asyncio.run(run()) == ["a1", "b1", "a2"]


@pytest.mark.parametrize("failure", [ValueError, asyncio.CancelledError])
def test_a_turn_that_fails_lets_the_next_one_in(failure: type[BaseException]) -> None:
    async def run() -> None:
        turnstile = Turnstile()
        with pytest.raises(failure):
            async with turnstile.turn("a"):
                raise failure
        async with asyncio.timeout(30), turnstile.turn("a"):
            pass

    asyncio.run(run())


# Texts beyond the context are refused before they are tokenized.

LONG = "word " * 200_000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": LONG}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        ("/v1/completions", {"prompt": LONG, "truncate_prompt_tokens": 5}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        (
            "/v1/chat/completions",
            {
                "messages": [HELLO],
                "tools": [{"type": "function", "function": {"name": "f", "description": LONG}}],
            },
            "messages",
        ),
        ("/v1/responses", {"input": LONG}, "messages"),
    ],
)
def test_a_text_beyond_the_context_is_refused_untokenized(
    path: str, body: dict[str, Any], param: str, http: httpx.Client
) -> None:
    error = http.post(path, json=body).json()["error"]
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert "28672 characters" in error["message"]  # 2,048 tokens of at most 14


def test_the_bound_is_that_of_the_longest_token() -> None:
    vocabulary = json.loads((SHIPPED_MODEL / "tokenizer.json").read_text())["model"]["vocab"]
    assert max(map(len, vocabulary)) == 28_672 // 2048


@pytest.mark.parametrize("stop", ["b" * 9000, ["b" * 150 + str(i) for i in range(60)]])
def test_stop_strings_are_bounded_in_all(stop: Any, http: httpx.Client) -> None:
    body = {"messages": [HELLO], "max_tokens": 1, "stop": stop}
    error = http.post("/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == "stop"
    assert "8192" in error["message"]


def test_token_ids_to_decode_are_bounded(http: httpx.Client) -> None:
    error = http.post("/detokenize", json={"tokens": [5] * 70_000}).json()["error"]
    assert error["param"] == "tokens"
    assert "65536" in error["message"]
    assert http.post("/detokenize", json={"tokens": [5] * 1000}).status_code == 200
