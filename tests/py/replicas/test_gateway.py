"""The gateway before a real server of this process, whose replicas die where the test says."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Awaitable, Iterable, Sequence
from contextlib import aclosing
from typing import Any

import httpx
import pytest
from starlette.types import Message

from flexinfer.async_llm import AsyncLLM
from flexinfer.ray import metrics
from flexinfer.ray.calls import Call, ReplicaLostError
from flexinfer.ray.gateway import MAX_ATTEMPTS, Gateway
from flexinfer.ray.replica import answer_of
from flexinfer.server.app import create_app
from helpers.serving import MODEL, make_llm, settings

pytestmark = pytest.mark.anyio

CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Tell me something"}],
    "max_tokens": 12,
    "temperature": 0,
}
STREAM = {**CHAT, "stream": True}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def llm() -> Iterable[AsyncLLM]:
    llm = make_llm(stream_interval=1)
    yield llm
    llm.shutdown()


class Replicas:
    """Forwards to one app; of attempt number i only the first `deaths[i]` messages arrive."""

    def __init__(self, llm: AsyncLLM, deaths: Sequence[int] = (), **given: Any) -> None:
        self.settings = settings(**given)
        self.app = create_app(llm, self.settings)
        self.deaths = list(deaths)
        self.calls: list[Call] = []
        self.asked: Any = self.pages
        self.num_closed = 0

    async def forward(self, call: Call) -> AsyncGenerator[Message, None]:
        self.calls.append(call)
        num_left = self.deaths.pop(0) if self.deaths else -1
        try:
            async with aclosing(answer_of(self.app, call)) as messages:
                async for message in messages:
                    if num_left == 0:
                        raise ReplicaLostError("killed")
                    num_left -= 1
                    yield message
        finally:
            self.num_closed += 1

    async def pages(self) -> list[Awaitable[tuple[str, str]]]:
        return [self.page("a", 1), self.page("b", 2)]

    async def page(self, name: str, count: int) -> tuple[str, str]:
        text = '# HELP n How many.\n# TYPE n counter\nn_total{model_name="m"} %d\n'
        return name, text % count

    def client(self) -> httpx.AsyncClient:
        app = Gateway(self.forward, lambda: self.asked(), self.settings)
        transport = httpx.ASGITransport(app)
        return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60)


async def post(replicas: Replicas, body: Any, path: str = "/v1/chat/completions") -> httpx.Response:
    async with replicas.client() as client:
        return await client.post(path, json=body)


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    *events, done = answer.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(one.removeprefix("data: ")) for one in events]


def shown(answer: httpx.Response) -> list[Any]:
    """What a caller sees of a stream, apart from its id."""
    return [event["choices"] for event in events_of(answer)]


@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "stream"])
async def test_the_answer_is_that_of_a_server_alone(body: Any, llm: AsyncLLM) -> None:
    replicas = Replicas(llm)
    transport = httpx.ASGITransport(replicas.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        alone = await client.post("/v1/chat/completions", json=body)
    answer = await post(replicas, body)
    assert answer.headers["content-type"] == alone.headers["content-type"]
    if body is STREAM:
        assert shown(answer) == shown(alone)
    else:
        assert answer.json()["choices"] == alone.json()["choices"]


@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "stream"])
@pytest.mark.parametrize("num_messages", [0, 1])
async def test_who_has_got_nothing_is_answered_by_another(
    num_messages: int, body: Any, llm: AsyncLLM
) -> None:
    replicas = Replicas(llm, [num_messages] * (MAX_ATTEMPTS - 1))
    assert (await post(replicas, body)).status_code == 200
    assert len(replicas.calls) == MAX_ATTEMPTS
    replicas = Replicas(llm, [num_messages] * MAX_ATTEMPTS)
    answer = await post(replicas, body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_lost")


@pytest.mark.parametrize("shows_ids", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_broken_stream_goes_on_where_it_stopped(
    path: str, shows_ids: bool, llm: AsyncLLM
) -> None:
    body = {**STREAM, "return_token_ids": shows_ids, "stream_options": {"include_usage": True}}
    if path == "/v1/completions":
        body = {**body, "prompt": "Tell me", "messages": None}
    whole = await post(Replicas(llm), body, path)
    num_messages = len(events_of(whole)) + 2
    for at in range(2, num_messages, 3):
        replicas = Replicas(llm, [at, 2])
        answer = await post(replicas, body, path)
        assert joined(answer) == joined(whole), at
        assert len({event["id"] for event in events_of(answer)}) == 1
        assert len(replicas.calls) == 3 or at > num_messages - 4
        again = json.loads(replicas.calls[-1].body)
        assert at < 3 or len(replicas.calls) == 1 or again["output_token_ids"]


def joined(answer: httpx.Response) -> Any:
    """Text, ids, roles, ends and usage; events of a stream that went on may be cut otherwise."""
    text, ids, rest = "", [], []
    for event in events_of(answer):
        for choice in event["choices"]:
            delta = choice.get("delta", choice)
            text += delta.get("content") or delta.get("text") or ""
            ids += choice.get("token_ids") or []
            rest += [v for k in ("role", "finish_reason") if (v := delta.get(k) or choice.get(k))]
        if event.get("usage"):
            rest.append({k: v for k, v in event["usage"].items() if k.endswith("_tokens")})
    return text, ids, rest


@pytest.mark.parametrize("fields", [{"n": 2}, {"logprobs": True}, {"tools": TOOLS}], ids=str)
async def test_a_stream_that_cannot_go_on_ends_by_an_error(fields: Any, llm: AsyncLLM) -> None:
    replicas = Replicas(llm, [4])
    answer = await post(replicas, {**STREAM, **fields})
    (*_, last) = events_of(answer)
    assert last["error"]["code"] == "replica_lost"
    assert len(replicas.calls) == 1


async def test_who_goes_away_ends_the_request(llm: AsyncLLM) -> None:
    replicas = Replicas(llm)
    sent: list[Message] = []
    left = asyncio.Event()
    body = {"type": "http.request", "body": json.dumps({**STREAM, "max_tokens": 1000}).encode()}
    received = iter([body])

    async def receive() -> Message:
        if (message := next(received, None)) is not None:
            return message
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)
        if len(sent) == 5:
            left.set()

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "root_path": ""}
    scope |= {"headers": [(b"host", b"localhost"), (b"content-type", b"application/json")]}
    scope |= {"query_string": b"", "http_version": "1.1", "scheme": "http"}
    app = Gateway(replicas.forward, replicas.pages, replicas.settings)
    await asyncio.wait_for(app(scope, receive, send), 60)
    assert replicas.num_closed == 1
    assert not await llm.call(lambda engine: engine.get_num_unfinished_requests())


async def test_numbers_of_all_replicas_are_told_apart(llm: AsyncLLM) -> None:
    async with Replicas(llm).client() as client:
        page = (await client.get("/metrics")).text
    assert page.count("# TYPE n_total counter") == 1
    assert 'n_total{model_name="m",replica="a"} 1.0' in page
    assert 'n_total{model_name="m",replica="b"} 2.0' in page
    assert up_of(page) == {"a": 1, "b": 1}


def up_of(page: str) -> dict[str, int]:
    found = re.findall(r'^flexinfer:replica_up{replica="(\S+)"} (\d)', page, re.MULTILINE)
    return {name: int(value) for name, value in found}


async def test_a_replica_that_hangs_is_named_beside_what_the_others_say(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up: list[bool] = []
    replicas = Replicas(llm)

    async def hang() -> tuple[str, str]:
        try:
            await asyncio.Event().wait()
        finally:
            given_up.append(True)
        raise AssertionError

    async def fail() -> tuple[str, str]:
        raise ReplicaLostError("killed")

    async def one_hangs() -> list[Awaitable[tuple[str, str]]]:
        return [hang(), replicas.page("b", 3)]

    async def all_are_gone() -> list[Awaitable[tuple[str, str]]]:
        return [fail(), hang(), hang()]

    async with replicas.client() as client:
        await client.get("/metrics")
        monkeypatch.setattr(metrics, "PAGES_TIMEOUT_S", 0.05)
        monkeypatch.setattr(replicas, "asked", one_hangs)
        page = (await asyncio.wait_for(client.get("/metrics"), 10)).text
        assert up_of(page) == {"a": 0, "b": 1}
        assert 'n_total{model_name="m",replica="b"} 3.0' in page
        assert given_up == [True]
        monkeypatch.setattr(replicas, "asked", all_are_gone)
        page = (await asyncio.wait_for(client.get("/metrics"), 10)).text
        assert up_of(page) == {"a": 0, "b": 0, "unknown-0": 0}


async def test_a_cluster_that_hangs_ends_no_scrape_late(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas = Replicas(llm)
    monkeypatch.setattr(metrics, "PAGES_TIMEOUT_S", 0.01)
    monkeypatch.setattr(replicas, "asked", asyncio.Event().wait)
    async with replicas.client() as client:
        answer = await asyncio.wait_for(client.get("/metrics"), 10)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "ray_hangs")


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        ("/v1/conversations", {}, 403),
        ("/admin/sleep", {}, 403),
        ("/v1/responses/resp_1", {}, 403),
        ("/v1/chat/completions", {**CHAT, "conversation": "c"}, 400),
        ("/v1/responses", {"input": "Hi", "previous_response_id": "r"}, 400),
    ],
)
async def test_what_one_server_remembers_is_refused(
    path: str, fields: Any, status: int, llm: AsyncLLM
) -> None:
    replicas = Replicas(llm)
    answer = await post(replicas, fields, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, "not_with_replicas")
    assert not replicas.calls


async def test_a_body_with_too_much_in_it_is_not_read_by_the_gateway(llm: AsyncLLM) -> None:
    replicas = Replicas(llm)
    answer = await post(replicas, {**CHAT, "metadata": [{}] * 20_000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "request_too_large")
    assert not replicas.calls


async def test_keys_are_checked_and_are_salts(llm: AsyncLLM) -> None:
    replicas = Replicas(llm, api_keys=("one", "two"))
    assert (await post(replicas, CHAT)).status_code == 401
    assert not replicas.calls
    async with replicas.client() as client:
        for key in ("one", "two", "one"):
            given = {"Authorization": f"Bearer {key}"}
            answer = await client.post("/v1/chat/completions", json=CHAT, headers=given)
            assert answer.status_code == 200
    first, second, again = (call.routed_prompt().blocks for call in replicas.calls)
    assert first == again
    assert not set(first) & set(second)


async def test_adapters_are_not_loaded_by_one_replica_alone(llm: AsyncLLM) -> None:
    replicas = Replicas(llm)
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        async with replicas.client() as client:
            answer = await client.post(path, json={"lora_name": "other"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "not_with_replicas")


def test_a_chat_that_goes_on_begins_as_before() -> None:
    from flexinfer.ray.calls import prompt_text

    turn = [{"role": "user", "content": "é" * 9}, {"content": "b", "role": "assistant"}]
    longer = [*turn, {"role": "user", "content": "more"}]
    assert prompt_text({"messages": longer}).startswith(prompt_text({"messages": turn}))
    assert prompt_text({"prompt": [5, 70000, 6]}).startswith(prompt_text({"prompt": [5, 70000]}))
    assert prompt_text({"prompt": 5, "messages": None}) == "5"
