"""Two replicas of two ranks each: answers, a rank and a replica that die; nothing is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import httpx
import openai
import psutil
import pytest

from flexinfer import LLM
from flexinfer.cli.settings import SHIPPED_CHUNK_BYTES, SHIPPED_MODEL
from flexinfer.sampling_params import SamplingParams
from helpers.replica_servers import (
    ask,
    client_of,
    messages_of,
    numbers,
    processes,
    running,
    serving_replicas,
)
from helpers.waiting import until

pytest.importorskip("ray", reason="replicas need Ray: make test-replicas installs it")
pytestmark = pytest.mark.slow

END_S = 5.0
NUM_TOKENS = 300


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    arguments = ("--tensor-parallel-size", "2", "--admin-api-key", "k")
    with serving_replicas(tmp_path_factory.mktemp("ray"), *arguments) as url:
        yield url
        replicas = [*processes(url).values()]
        ranks = [rank_of(replica) for replica in replicas]
    assert not [pid for pid in (*replicas, *ranks) if psutil.pid_exists(pid)]


@pytest.fixture(scope="module")
def client(served: str) -> openai.OpenAI:
    return client_of(served)


@pytest.fixture(scope="module")
def expected() -> str:
    """By one engine in one process."""
    with LLM(str(SHIPPED_MODEL), chunk_bytes=SHIPPED_CHUNK_BYTES) as llm:
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
        (output,) = llm.chat(messages_of("Go"), params)
        return output.outputs[0].text


def rank_of(replica: int) -> int:
    """The process beside the one that is the actor."""
    (rank,) = [
        child.pid
        for child in psutil.Process(replica).children()
        if "flexinfer.distributed.rank" in child.cmdline()
    ]
    return rank


@pytest.mark.parametrize("is_rank", [True, False], ids=["a rank", "the actor"])
def test_a_stream_goes_on_when_a_process_of_its_replica_is_killed(
    is_rank: bool, served: str, client: openai.OpenAI, expected: str
) -> None:
    until(lambda: len(processes(served)) == 2, "two replicas")
    extra = {"ignore_eos": True}
    stream = ask(client, "Go", max_tokens=NUM_TOKENS, extra_body=extra, stream=True)
    text, broken = "", []
    for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        if not broken and len(text) > 20:
            replica = running(served)
            broken = [replica, rank_of(replica)]
            os.kill(broken[is_rank], signal.SIGKILL)
    assert text == expected
    until(lambda: not any(map(psutil.pid_exists, broken)), "both to end", END_S)
    until(lambda: len(processes(served)) == 2, "two replicas")
    assert broken[0] not in processes(served).values()


def test_what_changes_an_engine_changes_all(served: str) -> None:
    until(lambda: len(processes(served)) == 2, "two replicas")
    with httpx.Client(base_url=served, headers={"Authorization": "Bearer k"}, timeout=90) as admin:
        for level in (1, 2):
            slept = admin.post("/admin/sleep", json={"level": level}).json()
            assert {*slept["replicas"]} == {*processes(served)}, slept
            assert all("returned_bytes" in told for told in slept["replicas"].values())
            assert numbers(served, "flexinfer:engine_sleeping") == dict.fromkeys(
                processes(served), 1
            )
            told = [*admin.post("/admin/wake").json()["replicas"].values()]
            assert told == [{"is_sleeping": False}] * 2
        name = min(processes(served))
        assert admin.post("/admin/sleep", params={"replica": name}).json()["returned_bytes"] >= 0
        sleeping = numbers(served, "flexinfer:engine_sleeping")
        assert [one for one, value in sleeping.items() if value] == [name]
        assert not admin.post("/admin/wake").json()["replicas"][name]["is_sleeping"]
