"""What one replica keeps is asked of that one alone: conversations and stored responses, by id."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import httpx
import pytest

from flexinfer.async_llm import AsyncLLM
from flexinfer.ray.kept import keeper_of
from flexinfer.server.app import create_app
from flexinfer.server.stores.kept_ids import kept_id, replica_of
from helpers.replica_cluster import Cluster
from helpers.serving import MODEL, make_llm, settings

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
FIRST, SECOND = "Tell me something", "And something else?"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def llm() -> Iterable[AsyncLLM]:
    llm = make_llm(stream_interval=1)
    yield llm
    llm.shutdown()


def turn(conversation: Any, text: str, **given: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    fixed = {"model": MODEL, "max_tokens": 12, "temperature": 0}
    return {**fixed, "conversation": conversation, "messages": messages, **given}


def said(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


async def make(client: httpx.AsyncClient) -> str:
    """A conversation's id."""
    name: str = (await client.post("/v1/conversations", json={})).json()["id"]
    return name


def code_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_an_id_names_its_replica() -> None:
    for kind in ("conv", "resp"):
        assert replica_of(kept_id(kind, "k3-j.h2")) == "k3-j.h2"
        assert replica_of(kept_id(kind, None)) is None
    assert replica_of("conv_a_") is None
    assert replica_of("chatcmpl_a_0f") is None


@pytest.mark.parametrize(
    ("path", "fields", "keeper"),
    [
        ("/v1/conversations/conv_a_0f", {}, "a"),
        ("/v1/conversations/conv_a_0f/fork", {}, "a"),
        ("/v1/responses/resp_b_0f", {}, "b"),
        ("/v1/responses/resp_0f", {}, None),
        ("/v1/conversations", {}, None),
        (CHAT, {"conversation": "conv_b_0f"}, "b"),
        (CHAT, {"conversation": {"id": "conv_b_0f", "ttl": 5}}, "b"),
        (CHAT, {"conversation": {"id": 5}}, None),
        (CHAT, {"conversation": None}, None),
        ("/v1/responses", {"previous_response_id": "resp_a_0f"}, "a"),
    ],
)
def test_requests_name_who_keeps(path: str, fields: Any, keeper: str | None) -> None:
    assert keeper_of(path, fields) == keeper


async def test_a_conversation_goes_on_where_it_is(llm: AsyncLLM) -> None:
    """The same words as at a server alone, though calls are sent to all in turn; another gateway
    in between, as one that has been started anew."""
    transport = httpx.ASGITransport(create_app(llm, settings()))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as alone:
        name = await make(alone)
        expected = [said(await alone.post(CHAT, json=turn(name, t))) for t in (FIRST, SECOND)]
    replicas = Cluster(llm, names=("a", "b", "c"))
    async with replicas.client() as client:
        names = [await make(client) for _ in range(6)]
        keepers = [replica_of(name) for name in names]
        assert {*keepers} == {"a", "b", "c"}
    for text, words in zip((FIRST, SECOND), expected, strict=True):
        async with replicas.client() as client:
            replicas.asked.clear()
            for name in names:
                assert said(await client.post(CHAT, json=turn(name, text))) == words
            assert replicas.asked == keepers


async def test_forks_reads_and_deletions_go_there_too(llm: AsyncLLM) -> None:
    replicas = Cluster(llm, names=("a", "b"))
    async with replicas.client() as client:
        name = await make(client)
        words = said(await client.post(CHAT, json=turn(name, FIRST)))
        for _ in range(2):  # whoever else would have its turn
            fork = (await client.post(f"/v1/conversations/{name}/fork")).json()["id"]
            assert replica_of(fork) == replica_of(name)
            told = (await client.get(f"/v1/conversations/{fork}")).json()
            assert [one["content"] for one in told["messages"]] == [FIRST, words]
            assert (await client.delete(f"/v1/conversations/{fork}")).json()["deleted"]
            gone = await client.get(f"/v1/conversations/{fork}")
            assert code_of(gone) == (404, "conversation_not_found")
        assert {*replicas.asked[1:]} == {replica_of(name)}


async def test_stored_responses_are_found_and_continued(llm: AsyncLLM) -> None:
    replicas = Cluster(llm, names=("a", "b"))
    fields = {"model": MODEL, "input": FIRST, "max_output_tokens": 8, "temperature": 0}
    async with replicas.client() as client:
        for stream in (False, True):
            answer = await client.post("/v1/responses", json={**fields, "stream": stream})
            events = answer.text.replace("data: ", "").split("\n")
            parsed = [json.loads(one) for one in events if one.startswith("{")]
            name = parsed[-1]["response"]["id"] if stream else parsed[0]["id"]
            more = {**fields, "input": SECOND, "previous_response_id": name}
            for _ in range(2):
                replicas.asked.clear()
                assert (await client.get(f"/v1/responses/{name}")).json()["id"] == name
                again = await client.post("/v1/responses", json=more)
                assert again.json()["previous_response_id"] == name
                assert {*replicas.asked} == {replica_of(name)}
            assert (await client.delete(f"/v1/responses/{name}")).json()["deleted"]
            gone = await client.post("/v1/responses", json=more)
            assert code_of(gone) == (404, "response_not_found")


async def test_a_tenant_finds_its_own_only(llm: AsyncLLM) -> None:
    replicas = Cluster(llm, names=("a", "b"), api_keys=("one", "two"))
    one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    async with replicas.client() as client:
        made = await client.post("/v1/conversations", json={}, headers=one)
        body = turn(made.json()["id"], FIRST)
        assert (await client.post(CHAT, json=body)).status_code == 401
        assert code_of(await client.post(CHAT, json=body, headers=two)) == (
            404,
            "conversation_not_found",
        )
        assert said(await client.post(CHAT, json=body, headers=one))


@pytest.mark.parametrize("stream", [False, True])
async def test_where_the_replica_has_gone_any_other_says_so(stream: bool, llm: AsyncLLM) -> None:
    replicas = Cluster(llm, names=("a", "b"))
    async with replicas.client() as client:
        name = await make(client)
        said(await client.post(CHAT, json=turn(name, FIRST)))
        stored = await client.post("/v1/responses", json={"model": MODEL, "input": "Hi"})
        for kept, code in (name, "conversation_not_found"), (stored.json()["id"], "response_not_"):
            lost = replicas.replicas.pop(str(replica_of(kept)), None)
            path = CHAT if kept is name else "/v1/responses"
            body = turn(kept, SECOND, stream=stream)
            if path != CHAT:
                body = {"model": MODEL, "input": SECOND, "previous_response_id": kept}
            answer = await client.post(path, json=body)
            assert answer.status_code == 404
            assert answer.json()["error"]["code"].startswith(code)
            assert "its replica has gone" in answer.json()["error"]["message"]
            if lost is not None:
                replicas.replicas[lost.name] = lost


@pytest.mark.parametrize("num_messages", [0, 1, 4])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_whose_replica_dies_is_not_asked_again(
    stream: bool, num_messages: int, llm: AsyncLLM
) -> None:
    """Nobody knows how much of it was done, and no other has what was said before."""
    replicas = Cluster(llm, names=("a", "b"))
    async with replicas.client() as client:
        name = await make(client)
        replicas.calls.clear()
        replicas.deaths = [num_messages]
        answer = await client.post(CHAT, json=turn(name, FIRST, stream=stream))
    assert len(replicas.calls) == 1
    if stream and num_messages == 4:
        *_, last, done = answer.text.removesuffix("\n\n").split("data: ")
        assert done == "[DONE]"
        assert json.loads(last)["error"]["code"] == "replica_lost"
    elif num_messages < 4:
        assert code_of(answer) == (503, "replica_lost")
        assert "what it kept is gone" in answer.json()["error"]["message"]
        assert "Retry-After" not in answer.headers
    else:  # all of it had been sent
        assert said(answer)


async def test_what_comes_to_the_wrong_one_is_not_answered(llm: AsyncLLM) -> None:
    """A router that does not know names: better no answer than one that there is no such thing."""
    replicas = Cluster(llm, names=("a", "b"))
    async with replicas.client() as client:
        name = await make(client)
        other = next(one for one in "ab" if one != replica_of(name))
        replicas.replicas[str(replica_of(name))] = replicas.replicas[other]
        answer = await client.get(f"/v1/conversations/{name}")
    assert code_of(answer) == (503, "wrong_replica")


async def test_who_goes_away_ends_a_turn(llm: AsyncLLM) -> None:
    replicas = Cluster(llm, names=("a", "b"))
    async with replicas.client() as client:
        name = await make(client)
        body = turn(name, FIRST, stream=True, max_tokens=900, ignore_eos=True)
        asking = asyncio.ensure_future(client.post(CHAT, json=body))
        while not await llm.call(lambda engine: engine.get_num_unfinished_requests()):
            await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.wait([asking])
        while await llm.call(lambda engine: engine.get_num_unfinished_requests()):
            await asyncio.sleep(0.01)
        assert said(await client.post(CHAT, json=turn(name, SECOND)))  # it is not busy for ever
