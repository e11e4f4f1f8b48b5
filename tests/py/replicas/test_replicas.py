"""Two replicas of the shipped model on a real cluster of this machine: answers, routes, deaths."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from flexinfer import LLM
from flexinfer.cli.settings import SHIPPED_CHUNK_BYTES, SHIPPED_MODEL
from flexinfer.sampling_params import SamplingParams
from helpers.replica_servers import ask, client_of, messages_of, numbers, serving_replicas

pytest.importorskip("ray", reason="replicas need Ray: make test-replicas installs it")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of `flexinfer serve --replicas 2`."""
    with serving_replicas(tmp_path_factory.mktemp("ray")) as url:
        yield url


@pytest.fixture(scope="module")
def client(served: str) -> openai.OpenAI:
    return client_of(served)


@pytest.fixture(scope="module")
def expected() -> str:
    """A long greedy answer by one engine alone."""
    with LLM(str(SHIPPED_MODEL), chunk_bytes=SHIPPED_CHUNK_BYTES) as llm:
        params = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)
        (output,) = llm.chat(messages_of("Go"), params)
        return output.outputs[0].text


def test_both_answer_and_a_prefix_stays_where_it_is(served: str, client: openai.OpenAI) -> None:
    for number in range(6):
        ask(client, f"{number} is the number")
    asked = numbers(served, "flexinfer:engine_up")
    assert len(asked) == 2
    cached = [ask(client, f"{n} is the number").usage.prompt_tokens_details for n in range(6)]
    assert all(one.cached_tokens > 100 for one in cached)


def test_a_replica_that_hangs_is_told_of_beside_the_other(served: str) -> None:
    before = numbers(served, "flexinfer:replica_up")
    assert list(before.values()) == [1, 1]
    hanging = min(before)
    os.kill(hanging, signal.SIGSTOP)
    try:
        assert numbers(served, "flexinfer:replica_up") == {**before, hanging: 0}
        assert list(numbers(served, "flexinfer:engine_up")) == [max(before)]
    finally:
        os.kill(hanging, signal.SIGCONT)


def test_a_broken_stream_goes_on_elsewhere(
    served: str, client: openai.OpenAI, expected: str
) -> None:
    """The replica that answers is killed in the middle of it."""
    before = numbers(served, "flexinfer:engine_up")
    stream = ask(client, "Go", max_tokens=400, extra_body={"ignore_eos": True}, stream=True)
    text, killed = "", None
    for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        if killed is None and len(text) > 20:
            running = numbers(served, "flexinfer:num_requests_running")
            (killed,) = [pid for pid, count in running.items() if count]
            os.kill(killed, signal.SIGKILL)
    assert killed in before
    assert text == expected


def test_who_goes_away_frees_its_replica(served: str, client: openai.OpenAI) -> None:
    stream = ask(client, "Go", max_tokens=1500, extra_body={"ignore_eos": True}, stream=True)
    next(iter(stream))
    assert sum(numbers(served, "flexinfer:num_requests_running").values()) == 1
    stream.close()
    deadline = time.monotonic() + 30
    while sum(numbers(served, "flexinfer:num_requests_running").values()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_page_and_errors_come_through(served: str, client: openai.OpenAI) -> None:
    assert "<html" in httpx.get(served, timeout=60).text
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        ask(client, "word " * 5000)
    assert httpx.get(f"{served}/ready", timeout=60).json() == {"status": "ready"}
