"""`/admin` where there are several engines: the one that is named, or any that shows, or all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest

from flexinfer.async_llm import AsyncLLM
from flexinfer.ray import administration
from helpers.replica_cluster import Cluster
from helpers.serving import make_llm

pytestmark = pytest.mark.anyio

MEMORY = "/admin/memory"
KEY = {"Authorization": "Bearer k"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def llms() -> Iterable[dict[str, AsyncLLM]]:
    """An engine each: what changes one must not change the other."""
    made = {name: make_llm(kv_cache_memory_bytes=8 << 20) for name in "ab"}
    yield made
    for llm in made.values():
        llm.shutdown()


def cluster(llms: dict[str, AsyncLLM], **given: Any) -> Cluster:
    replicas = Cluster(llms["a"], names=("a",), **given)
    replicas.replicas |= Cluster(llms["b"], names=("b",), **given).replicas
    return replicas


def error_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def test_a_map_says_whose_it_is_and_who_else_there_is(llms: dict[str, AsyncLLM]) -> None:
    replicas = cluster(llms)
    async with replicas.client() as client:
        for name in "baba":
            answer = await client.get(MEMORY, params={"replica": name})
            told = answer.json()
            assert (told["replica"], told["replicas"]) == (name, ["a", "b"])
            assert (told["object"], answer.headers["x-replica"]) == ("memory_map", name)
            known = {"If-None-Match": answer.headers["etag"]}
            again = await client.get(MEMORY, params={"replica": name}, headers=known)
            assert (again.status_code, again.content) == (304, b"")
        any_one = (await client.get(MEMORY)).json()
        assert any_one["replica"] in any_one["replicas"] == ["a", "b"]
        told = await client.get(MEMORY, params={"replica": "a"}, headers=known)
        assert told.status_code == 304
        del replicas.replicas["b"]  # the map of a is what it was, but not who there is
        changed = await client.get(MEMORY, params={"replica": "a"}, headers=known)
        assert changed.json()["replicas"] == ["a"]


async def test_an_unknown_replica_is_named_and_nothing_is_changed(
    llms: dict[str, AsyncLLM],
) -> None:
    async with cluster(llms, admin_api_key="k").client(headers=KEY) as client:
        for method, path in ("GET", MEMORY), ("POST", "/admin/sleep"):
            answer = await client.request(method, path, params={"replica": "c"})
            assert error_of(answer) == (404, "no_such_replica")
            assert "there are: a, b" in answer.json()["error"]["message"]
    assert not [llm for llm in llms.values() if await llm.is_sleeping()]


@pytest.mark.parametrize("query", ["replica=", "replica", "replica=a&replica=b"])
async def test_a_query_that_names_not_one_replica_changes_none(
    query: str, llms: dict[str, AsyncLLM]
) -> None:
    """`?replica=$NAME` of a shell where NAME is not set must not put all of them to sleep."""
    async with cluster(llms, admin_api_key="k").client(headers=KEY) as client:
        answer = await client.post(f"/admin/sleep?{query}")
        assert answer.status_code in (400, 404), answer.text
        assert answer.json()["error"]["param"] == "replica"
    assert not [llm for llm in llms.values() if await llm.is_sleeping()]


async def test_an_answer_without_a_body_is_passed_on(llms: dict[str, AsyncLLM]) -> None:
    """A redirect, to the path without the slash at its end."""
    async with cluster(llms, admin_api_key="k").client(headers=KEY) as client:
        answer = await client.post("/admin/wake/")
        assert answer.status_code == 307
        assert httpx.URL(answer.headers["location"]).path == "/admin/wake"


async def test_the_one_that_is_named_changes_alone(llms: dict[str, AsyncLLM]) -> None:
    async with cluster(llms, admin_api_key="k").client(headers=KEY) as client:
        to_a = {"replica": "a"}
        answer = await client.post("/admin/sleep", params=to_a, json={"level": 1})
        assert "returned_bytes" in answer.json()
        assert [await llms[name].is_sleeping() for name in "ab"] == [True, False]
        assert (await client.get(MEMORY, params=to_a)).json()["engine"]["is_sleeping"]
        assert (await client.post("/admin/wake", params=to_a)).json() == {"is_sleeping": False}
        assert "returned_bytes" in (await client.post("/sleep", params=to_a)).json()
        assert [await llms[name].is_sleeping() for name in "ab"] == [True, False]
        told = (await client.post("/wake_up")).json()["replicas"]
        assert told == {name: {"is_sleeping": False} for name in "ab"}
        body = {"kv_cache_memory": "4MiB"}
        answer = await client.post("/admin/budget", params={"replica": "b"}, json=body)
        assert answer.json()["new_bytes"] == 4 << 20
        budgets = [
            (await client.get(MEMORY, params={"replica": name})).json()["stats"]["budget_bytes"]
            for name in "ab"
        ]
        assert budgets == [8 << 20, 4 << 20]


async def test_without_a_name_all_change_and_each_says_so(llms: dict[str, AsyncLLM]) -> None:
    async with cluster(llms, admin_api_key="k").client(headers=KEY) as client:
        answer = await client.post("/admin/budget", json={"kv_cache_memory": "6MiB"})
        told = answer.json()["replicas"]
        assert (answer.status_code, [*told]) == (200, ["a", "b"])
        assert [one["new_bytes"] for one in told.values()] == [6 << 20] * 2
        assert (await client.post("/admin/sleep", params={"replica": "a"})).status_code == 200
        answer = await client.post("/admin/reset_prefix_cache")
        assert error_of(answer) == (409, "asleep")
        assert "1 of 2 replicas have not done it: a: " in answer.json()["error"]["message"]
        told = answer.json()["replicas"]
        assert told["a"]["error"]["code"] == "asleep"
        assert "forgotten_tokens" in told["b"]
        told = (await client.post("/admin/wake")).json()["replicas"]
        assert told == {"a": {"is_sleeping": False}, "b": {"is_sleeping": False}}


async def test_each_writes_a_trace_of_its_own(llms: dict[str, AsyncLLM], tmp_path: Path) -> None:
    async with cluster(llms, admin_api_key="k", trace_dir=tmp_path).client(headers=KEY) as client:
        started = await client.post("/admin/trace", json={"action": "start", "name": "run.jsonl"})
        stopped = await client.post("/admin/trace", json={"action": "stop"})
    assert (started.status_code, stopped.status_code) == (200, 200), started.text
    files = [tmp_path / "a-run.jsonl", tmp_path / "b-run.jsonl"]
    assert [Path(one["path"]) for one in stopped.json()["replicas"].values()] == files
    assert all(file.stat().st_size for file in files)


async def test_one_that_hangs_harms_no_other(
    llms: dict[str, AsyncLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas = cluster(llms, admin_api_key="k")
    async with replicas.client(headers=KEY) as client:
        await client.post("/admin/reset_prefix_cache")  # all have answered once
        monkeypatch.setattr(administration, "LOOK_TIMEOUT_S", 3.0)
        monkeypatch.setattr(administration, "CHANGE_TIMEOUT_S", 3.0)
        replicas.hanging = {"a"}
        for _ in range(2):  # in turn the one that hangs, and the other
            told = (await asyncio.wait_for(client.get(MEMORY), 60)).json()
            assert (told["replica"], told["replicas"]) == ("b", ["a", "b"])
        answer = await client.get(MEMORY, params={"replica": "a"})
        assert error_of(answer) == (503, "replica_silent")
        assert "the replica a has not answered within 3 s" in answer.json()["error"]["message"]
        answer = await client.post("/admin/reset_prefix_cache")
        assert error_of(answer) == (503, "replica_silent")
        told = answer.json()["replicas"]
        assert "a has died, or has not answered" in told["a"]["error"]["message"]
        assert "it may still do" in told["a"]["error"]["message"]
        assert "forgotten_tokens" in told["b"]
        replicas.hanging = {"a", "b"}
        assert error_of(await client.get(MEMORY)) == (503, "replica_silent")


async def test_one_that_dies_is_told_of(llms: dict[str, AsyncLLM]) -> None:
    replicas = cluster(llms, admin_api_key="k")
    async with replicas.client(headers=KEY) as client:
        replicas.deaths = [0]
        answer = await client.post("/admin/sleep", params={"replica": "a"})
        assert error_of(answer) == (503, "replica_lost")
        replicas.deaths = [1]
        assert (await client.get(MEMORY)).status_code == 200  # of another


async def test_keys_are_those_of_a_server_alone(llms: dict[str, AsyncLLM]) -> None:
    async with cluster(llms).client() as client:
        assert (await client.get(MEMORY)).status_code == 200
        foreign = {"Host": "example.org"}
        assert (await client.get(MEMORY, headers=foreign)).status_code == 403
        assert error_of(await client.post("/admin/sleep")) == (403, "admin_disabled")
    async with cluster(llms, api_keys=("one",)).client(headers={"X-Api-Key": "one"}) as client:
        assert error_of(await client.get(MEMORY)) == (403, "admin_disabled")
    replicas = cluster(llms, admin_api_key="k")
    async with replicas.client() as client:
        for path in (MEMORY, f"{MEMORY}?replica=a"):
            assert (await client.get(path)).status_code == 401
            wrong = {"Authorization": "Bearer other"}
            assert error_of(await client.get(path, headers=wrong)) == (401, "invalid_api_key")
        assert not replicas.calls
