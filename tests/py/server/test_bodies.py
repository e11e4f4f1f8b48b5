"""Large bodies: what one may hold, and what is left of the event loop beside them."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import Future
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter, ValidationError

from flexinfer.cli.settings import SHIPPED_MODEL
from flexinfer.server.http import bodies
from flexinfer.server.http.bodies import Pace, Turnstile, check_size
from flexinfer.server.protocol.chat import ChatRequest
from flexinfer.server.protocol.conversations import ConversationRequest
from flexinfer.server.protocol.messages import MessagesRequest
from flexinfer.server.protocol.responses import ResponsesRequest

HELLO = {"role": "user", "content": "hello"}
TEXT = {"type": "text", "text": "a"}
THOUGHT = {"type": "reasoning_text", "text": "a"}
KINDS = ["application/json", "application/x+json"]
"""The second way leads through FastAPI."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text"}] * 17_000}]},
            "more than 16384 objects and lists",
        ),
        (
            "/v1/chat/completions",
            {"messages": [HELLO], "chat_template_kwargs": {"a": [[]] * 20_000}},
            "objects and lists",
        ),
        ("/v1/completions", {"prompt": [[1]] * 20_000}, "objects and lists"),
        ("/v1/completions", {"prompt": [1] * 300_000}, "more than 262144 values"),
        ("/v1/responses", {"input": "a", "tools": [{"name": "f"}] * 20_000}, "objects and lists"),
        ("/v1/conversations", {"metadata": {str(i): "a" for i in range(300_000)}}, "values"),
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
        json.dumps({"a": ["[,", "\\", '"', '\\"[,' * 10_000] * 40}),
    ],
)
def test_what_stands_in_texts_does_not_count(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for piece_bytes in (bodies.PIECE_BYTES, 1021):  # which cuts escapes, and texts
        monkeypatch.setattr(bodies, "PIECE_BYTES", piece_bytes)
        asyncio.run(check_size(text.encode(), Pace()))


def test_one_long_text_is_not_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """That held the event loop for 17 ms at 7 MiB."""
    parted: list[int] = []
    monkeypatch.setattr(bodies, "_piece", lambda body, start: parted.append(start) or body[start:])
    asyncio.run(check_size(json.dumps({"metadata": {"a": "x" * 1_000_000}}).encode(), Pace()))
    assert not parted
    asyncio.run(check_size(json.dumps({"a": "[" * 20_000}).encode(), Pace()))
    assert len(parted) == 1


@pytest.mark.parametrize(
    ("mark", "bound"),
    [("{", "MAX_CONTAINERS"), ("[", "MAX_CONTAINERS"), (",", "MAX_VALUES")],
)
def test_each_mark_counts_and_no_other_character(
    mark: str, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, bound, 100)
    monkeypatch.setattr(bodies, "PIECE_BYTES", 257)
    others = bytes(set(range(256)) - set(b"{[,")) * 20
    for num_marks, is_within in ((100, True), (101, False)):
        body = others + mark.encode() * num_marks + others
        assert asyncio.run(bodies._is_within_bounds(body, Pace())) == is_within


class Clock:
    """The time of a thread that does nothing else but what a test says, and what was slept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.slept_s: list[float] = []
        monkeypatch.setattr(bodies.time, "thread_time", lambda: self.now_s)
        monkeypatch.setattr(bodies.asyncio, "sleep", self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)


def test_work_in_slices_rests_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    pace = Pace()

    async def work() -> None:
        for worked_s in (0.0001, 0.0005, 0.0005, 0.010):
            clock.now_s += worked_s
            await pace.pause()

    asyncio.run(work())
    assert clock.slept_s == pytest.approx([bodies.REST * one for one in (0.0006, 0.0005, 0.010)])
    clock.now_s += 0.0001
    assert pace.rest_s() == pytest.approx(bodies.LONG_REST * 0.010)


def test_the_parsers_one_call_has_the_loop_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was done before and after it is not added to the time for which others wait."""
    clock = Clock(monkeypatch)
    parse = bodies.from_json
    parsed_after: list[int] = []

    def slowly(text: bytes) -> Any:
        parsed_after.append(len(clock.slept_s))
        clock.now_s += 0.001
        return parse(text)

    monkeypatch.setattr(bodies, "from_json", slowly)
    asyncio.run(bodies.read_large(b'"' + b"a" * bodies.LARGE_BYTES + b'"', None, Pace()))
    assert parsed_after == [1]
    assert clock.slept_s == pytest.approx([0, bodies.REST * 0.001])


def test_the_next_body_waits_for_four_seconds_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    short, long = Pace(), Pace()
    clock.now_s += 0.001
    assert short.rest_s() == pytest.approx(bodies.REST * 0.001)
    clock.now_s += 0.1
    assert long.rest_s() == bodies.MAX_REST_S


@pytest.mark.parametrize(
    ("kind", "body", "num_validated"),
    [
        (ChatRequest, {"messages": [HELLO] * 500}, 500),
        (ChatRequest, {"messages": [{"role": "user", "content": [TEXT] * 500}]}, 501),
        (ResponsesRequest, {"input": [{"role": "user", "content": [TEXT] * 500}]}, 501),
        (ResponsesRequest, {"input": [{"type": "reasoning", "content": [THOUGHT] * 500}]}, 501),
        (ConversationRequest, {"items": [HELLO] * 500}, 500),
        (MessagesRequest, {"messages": [{"role": "user", "content": [TEXT] * 500}]}, 501),
        (ChatRequest, {"messages": [HELLO] * 100 + [{"role": "x"}] + [HELLO] * 100}, 100),
        (ChatRequest, {"messages": [HELLO] * 9000}, 0),
        (ChatRequest, {"messages": "a" * 20_000}, 0),
    ],
)
def test_long_lists_are_validated_item_by_item(
    kind: type[Any], body: dict[str, Any], num_validated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then all of it costs little, and finds what it would have found before."""
    clock = Clock(monkeypatch)
    validate = TypeAdapter.validate_python
    validated: list[Any] = []

    def slowly(adapter: TypeAdapter[Any], value: Any) -> Any:
        made = validate(adapter, value)
        clock.now_s += 0.0001
        validated.append(made)
        return made

    monkeypatch.setattr(TypeAdapter, "validate_python", slowly)
    text = json.dumps(body).encode()
    read = asyncio.run(bodies.read_large(text, kind, Pace()))
    assert len(validated) == num_validated
    assert max(clock.slept_s, default=0) <= bodies.REST * 0.00175  # 17 items
    assert len(clock.slept_s) >= num_validated // 20
    assert outcome(kind, read) == outcome(kind, body)


NEEDED: dict[type[Any], Any] = {MessagesRequest: {"model": "m", "max_tokens": 1}}


def outcome(kind: type[Any], given: Any) -> Any:
    """What validation makes of it, or where it finds fault."""
    try:
        return kind.model_validate({**given, **NEEDED.get(kind, {})})
    except ValidationError as error:
        return error.errors(include_url=False)[0]["loc"]


def test_between_large_bodies_of_a_tenant_others_have_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> list[str]:
        turnstile, order = Turnstile(), []
        loop = asyncio.get_running_loop()
        later: list[Any] = []
        monkeypatch.setattr(loop, "call_later", lambda delay, call, *_: later.append(call))

        async def read(tenant: str) -> None:
            async with turnstile.reading(tenant):
                order.append(tenant)

        tasks = [asyncio.ensure_future(read(tenant)) for tenant in ("a", "a", "b")]
        for _ in range(5):
            await asyncio.sleep(0)
        assert order == ["a", "b"]
        later[0]()
        await asyncio.gather(*tasks)
        return order

    assert asyncio.run(run()) == ["a", "b", "a"]


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


def test_a_turn_lasts_as_long_as_its_thread_though_the_caller_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        turnstile, later = Turnstile(), []
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "call_later", lambda _, call: later.append(call))
        thread: Future[None] = Future()
        thread.set_running_or_notify_cancel()  # nothing takes it back

        async def compile_one() -> None:
            async with turnstile.turn("a") as work:
                work.append(thread)
                await asyncio.wrap_future(thread)

        caller = asyncio.ensure_future(compile_one())
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.wait([caller])
        await asyncio.sleep(0)
        assert not later
        thread.set_result(None)
        while not later:
            await asyncio.sleep(0)
        later[0]()
        async with turnstile.turn("a"):
            pass

    asyncio.run(run())


@pytest.mark.parametrize(
    ("worked_s", "has_others", "rest_s"),
    [
        (0.01, True, 0),  # a burst
        (0.04, True, 0.02 / bodies.TURNS_S_PER_S),
        (30, True, bodies.MAX_TURN_REST_S),
        (0.04, False, 0.04 * bodies.REST),
        (30, False, bodies.MAX_REST_ALONE_S),
    ],
)
def test_after_a_turn_the_tenants_next_one_waits_for_the_sake_of_others(
    worked_s: float, has_others: bool, rest_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> list[float]:
        loop = asyncio.get_running_loop()
        rests: list[float] = []
        monkeypatch.setattr(loop, "call_later", lambda delay, *_: rests.append(delay))
        now_s = loop.time()
        monkeypatch.setattr(loop, "time", lambda: now_s)
        async with Turnstile(lambda tenant: has_others).turn("a"):
            monkeypatch.setattr(loop, "time", lambda: now_s + worked_s)
        return rests

    assert asyncio.run(run()) == pytest.approx([rest_s])


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


def test_a_conversation_that_no_context_holds_is_not_kept(http: httpx.Client) -> None:
    given = {"messages": [{"role": "user", "content": LONG}]}
    error = http.post("/v1/conversations", json=given).json()["error"]
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


def test_a_chat_of_more_messages_than_tokens_is_refused_unrendered(http: httpx.Client) -> None:
    error = http.post("/v1/chat/completions", json={"messages": [HELLO] * 2049}).json()["error"]
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    assert "a chat of 2049 messages" in error["message"]
