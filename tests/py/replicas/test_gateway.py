"""The gateway before a real server of this process, whose replicas die where the test says."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Iterable
from typing import Any

import httpx
import pytest
from starlette.types import Message

from flexinfer.async_llm import AsyncLLM
from flexinfer.ray import metrics
from flexinfer.ray.gateway import MAX_ATTEMPTS
from flexinfer.server.app import create_app
from flexinfer.server.lora_module_path import LoRAModulePath
from helpers.replica_cluster import Cluster
from helpers.serving import MODEL, make_llm, settings

pytestmark = pytest.mark.anyio

CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Tell me something"}],
    "max_tokens": 12,
    "temperature": 0,
}
STREAM = {**CHAT, "stream": True}
LONG = {**CHAT, "messages": [{"role": "user", "content": "Tell me something. " * 20}]}
"""Some blocks of a router's."""
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def llm() -> Iterable[AsyncLLM]:
    llm = make_llm(stream_interval=1)
    yield llm
    llm.shutdown()


async def post(replicas: Cluster, body: Any, path: str = "/v1/chat/completions") -> httpx.Response:
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


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("depth", [100, 190, 500, 5000])
async def test_lists_in_lists_are_refused_as_by_a_server_alone(
    depth: int, path: str, llm: AsyncLLM
) -> None:
    """Python reads deeper ones than it walks through."""
    fields = {"model": MODEL, "stream": True, "messages": "DEEP", "prompt": "DEEP"}
    body = json.dumps(fields).replace('"DEEP"', "[" * depth + "1" + "]" * depth)
    headers = {"Content-Type": "application/json"}
    transport = httpx.ASGITransport(create_app(llm, settings()))
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as alone,
        Cluster(llm).client() as client,
    ):
        expected = await alone.post(path, content=body, headers=headers)
        answer = await client.post(path, content=body, headers=headers)
    assert expected.status_code == 400
    assert (answer.status_code, answer.json()["error"]["code"]) == (
        400,
        expected.json()["error"]["code"],
    )


async def test_a_method_that_needs_no_key_is_answered_as_by_a_server_alone(llm: AsyncLLM) -> None:
    given = {"api_keys": ("one",), "admin_api_key": "two"}
    transport = httpx.ASGITransport(create_app(llm, settings(**given)))
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as alone,
        Cluster(llm, **given).client() as client,
    ):
        for path in "/v1/chat/completions", "/admin/wake":
            expected, answer = await alone.options(path), await client.options(path)
            assert (answer.status_code, answer.json()) == (expected.status_code, expected.json())


@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "stream"])
async def test_the_answer_is_that_of_a_server_alone(body: Any, llm: AsyncLLM) -> None:
    replicas = Cluster(llm)
    transport = httpx.ASGITransport(create_app(llm, settings()))
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
    replicas = Cluster(llm, [num_messages] * (MAX_ATTEMPTS - 1))
    assert (await post(replicas, body)).status_code == 200
    assert len(replicas.calls) == MAX_ATTEMPTS
    replicas = Cluster(llm, [num_messages] * MAX_ATTEMPTS)
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
    whole = await post(Cluster(llm), body, path)
    num_messages = len(events_of(whole)) + 2
    for at in range(2, num_messages, 3):
        replicas = Cluster(llm, [at, 2])
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
    replicas = Cluster(llm, [4])
    answer = await post(replicas, {**STREAM, **fields})
    (*_, last) = events_of(answer)
    assert last["error"]["code"] == "replica_lost"
    assert len(replicas.calls) == 1


async def test_who_goes_away_ends_the_request(llm: AsyncLLM) -> None:
    replicas = Cluster(llm)
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
    await asyncio.wait_for(replicas.gateway()(scope, receive, send), 60)
    assert replicas.num_closed == 1
    assert not await llm.call(lambda engine: engine.get_num_unfinished_requests())


async def test_numbers_of_all_replicas_are_told_apart(llm: AsyncLLM) -> None:
    async with Cluster(llm, names=("a", "b")).client() as client:
        page = (await client.get("/metrics")).text
    assert page.count("# TYPE flexinfer:engine_up gauge") == 1
    for name in ("a", "b"):
        assert re.search(rf'^flexinfer:engine_up{{.*replica="{name}"}} 1.0', page, re.MULTILINE)
        found = re.search(rf'replica_process{{host="\S+",pid="(\d+)",replica="{name}"}} 1', page)
        assert found is not None
        assert int(found[1]) == os.getpid()
    assert up_of(page) == {"a": 1, "b": 1}


def up_of(page: str) -> dict[str, int]:
    found = re.findall(r'^flexinfer:replica_up{replica="(\S+)"} (\d)', page, re.MULTILINE)
    return {name: int(value) for name, value in found}


async def test_a_replica_that_hangs_is_named_beside_what_the_others_say(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas = Cluster(llm, names=("a", "b"))
    async with replicas.client() as client:
        await client.get("/metrics")
        monkeypatch.setattr(metrics, "PAGES_TIMEOUT_S", 3.0)
        replicas.hanging = {"a"}
        num_closed = replicas.num_closed
        page = (await asyncio.wait_for(client.get("/metrics"), 60)).text
        assert up_of(page) == {"a": 0, "b": 1}
        assert re.search(r'^flexinfer:engine_up{.*replica="b"} 1.0', page, re.MULTILINE)
        assert replicas.num_closed == num_closed + 2  # the one that hangs was given up
        replicas.hanging = {"a", "b", "c"}
        replicas.replicas["c"] = replicas.replicas["b"]
        page = (await asyncio.wait_for(client.get("/metrics"), 60)).text
        assert up_of(page) == {"a": 0, "b": 0, "unknown-0": 0}


async def test_a_cluster_that_hangs_ends_no_scrape_late(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas = Cluster(llm)
    monkeypatch.setattr(metrics, "PAGES_TIMEOUT_S", 0.01)
    replicas.is_hanging = True
    async with replicas.client() as client:
        answer = await asyncio.wait_for(client.get("/metrics"), 60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "ray_hangs")


async def test_a_body_with_too_much_in_it_is_not_read_by_the_gateway(llm: AsyncLLM) -> None:
    replicas = Cluster(llm)
    answer = await post(replicas, {**CHAT, "metadata": [{}] * 20_000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "request_too_large")
    assert not replicas.calls


async def test_keys_are_checked_and_are_salts(llm: AsyncLLM) -> None:
    replicas = Cluster(llm, api_keys=("one", "two"))
    assert (await post(replicas, CHAT)).status_code == 401
    assert not replicas.calls
    async with replicas.client() as client:
        for key in ("one", "two", "one"):
            given = {"Authorization": f"Bearer {key}"}
            answer = await client.post("/v1/chat/completions", json=LONG, headers=given)
            assert answer.status_code == 200
    first, second, again = (call.routed_prompt().blocks for call in replicas.calls)
    assert first == again != ()
    assert not set(first) & set(second)


async def test_adapters_are_not_loaded_by_one_replica_alone(llm: AsyncLLM) -> None:
    replicas = Cluster(llm)
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        answer = await post(replicas, {"lora_name": "other"}, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "not_with_replicas")
        assert "--lora-modules" in answer.json()["error"]["message"]


async def test_adapters_have_prefixes_of_their_own(llm: AsyncLLM) -> None:
    replicas = Cluster(llm)
    replicas.settings = settings(lora_modules=(LoRAModulePath("other", "folder"),))
    for model in (MODEL, "other", "other"):
        await post(replicas, {**LONG, "model": model})
    base, other, again = (call.routed_prompt().blocks for call in replicas.calls)
    assert other == again != ()
    assert not set(base) & set(other)


def test_a_chat_that_goes_on_begins_as_before() -> None:
    from flexinfer.ray.calls import prompt_text

    turn = [{"role": "user", "content": "é" * 9}, {"content": "b", "role": "assistant"}]
    longer = [*turn, {"role": "user", "content": "more"}]
    assert prompt_text({"messages": longer}).startswith(prompt_text({"messages": turn}))
    assert prompt_text({"prompt": [5, 70000, 6]}).startswith(prompt_text({"prompt": [5, 70000]}))
    assert prompt_text({"prompt": 5, "messages": None}) == "5"
