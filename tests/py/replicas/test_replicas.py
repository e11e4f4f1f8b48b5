"""Two replicas of the shipped model on a real cluster of this machine: answers, routes, deaths."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from typer.testing import CliRunner

from flexinfer import LLM, LoRARequest
from flexinfer.cli.app import app
from flexinfer.cli.settings import SHIPPED_CHUNK_BYTES, SHIPPED_MODEL
from flexinfer.sampling_params import SamplingParams
from flexinfer.server.stores.kept_ids import replica_of
from helpers.replica_servers import (
    ask,
    messages_of,
    numbers,
    processes,
    running,
)
from helpers.serving import MODEL
from helpers.waiting import until

pytest.importorskip("ray", reason="replicas need Ray: make test-replicas installs it")
pytestmark = pytest.mark.slow


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


def one_of_each(url: str) -> dict[str, str]:
    """A conversation at each replica."""
    made: dict[str, str] = {}
    while not {*made} >= (names := {*processes(url)}):
        kept = httpx.post(f"{url}/v1/conversations", json={}, timeout=60).json()["id"]
        made[str(replica_of(kept))] = kept
    return {name: made[name] for name in names}


def test_each_replica_has_the_adapters(served: str, client: openai.OpenAI, adapter: Path) -> None:
    given = {"chunk_bytes": SHIPPED_CHUNK_BYTES, "enable_lora": True}
    with LLM(str(SHIPPED_MODEL), **given) as llm:
        params = SamplingParams(max_tokens=16, temperature=0)
        request = LoRARequest("other", 1, str(adapter))
        said = [
            llm.chat(messages_of("Go"), params, lora_request=one)[0].outputs[0].text
            for one in (request, None)
        ]
    assert said[0] != said[1]
    for model, expected in zip(("other", MODEL), said, strict=True):
        for kept in one_of_each(served).values():
            answer = ask(client, "Go", model=model, extra_body={"conversation": kept})
            assert answer.choices[0].message.content == expected


def test_conversations_stay_where_they_are(served: str, client: openai.OpenAI) -> None:
    """Also when the gateway is started anew; what is said is what one server says."""
    texts = ("Hello! My name is Ada.", "What is my name?")
    kept = one_of_each(served)
    said = {name: [turn(client, one, texts[0])] for name, one in kept.items()}
    replica = psutil.Process(next(iter(processes(served).values())))
    (gateway,) = [one for one in replica.parent().children() if "gateway" in one.name()]
    gateway.kill()
    gateway.wait()
    until(lambda: is_there(f"{served}/v1/conversations/{min(kept.values())}"), "another gateway")
    for name, one in kept.items():
        said[name].append(turn(client, one, texts[1]))
    first, second = said.values()
    assert first == second
    assert "Ada" in first[1]
    stored = client.responses.create(model=MODEL, input=texts[0], max_output_tokens=16)
    for _ in range(4):  # whoever else would be chosen
        assert client.responses.retrieve(stored.id).id == stored.id
        more = client.responses.create(
            model=MODEL, input=texts[1], previous_response_id=stored.id, temperature=0
        )
        assert "Ada" in more.output_text
        assert replica_of(more.id) == replica_of(stored.id)


def turn(client: openai.OpenAI, kept: str, text: str) -> str:
    answer: Any = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": text}],
        max_tokens=24,
        temperature=0,
        extra_body={"conversation": kept},
    )
    return str(answer.choices[0].message.content)


def is_there(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(url, timeout=60).status_code == 200
    return False


def test_a_replica_that_hangs_is_told_of_beside_the_other(served: str) -> None:
    before = numbers(served, "flexinfer:replica_up")
    assert list(before.values()) == [1, 1]
    hanging, pid = min(processes(served).items())
    os.kill(pid, signal.SIGSTOP)
    try:
        assert numbers(served, "flexinfer:replica_up") == {**before, hanging: 0}
        told = httpx.get(f"{served}/admin/memory", timeout=60).json()
        assert "replica" in told, told
        assert (told["replica"], told["replicas"]) == (max(before), sorted(before))
        silent = httpx.get(f"{served}/admin/memory", params={"replica": hanging}, timeout=60)
        assert silent.json()["error"]["code"] == "replica_silent"
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_broken_stream_goes_on_elsewhere(
    served: str, client: openai.OpenAI, expected: str
) -> None:
    """The replica that answers is killed in the middle of it."""
    before = processes(served)
    stream = ask(client, "Go", max_tokens=400, extra_body={"ignore_eos": True}, stream=True)
    text, killed = "", None
    for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        if killed is None and len(text) > 20:
            killed = running(served)
            os.kill(killed, signal.SIGKILL)
    assert killed in before.values()
    assert text == expected


def test_a_conversation_ends_with_its_replica(served: str, client: openai.OpenAI) -> None:
    until(lambda: len(processes(served)) == 2, "two replicas")
    name, kept = next(iter(one_of_each(served).items()))
    turn(client, kept, "Hello")
    extra = {"conversation": kept, "ignore_eos": True}
    stream = ask(client, "Go", max_tokens=900, extra_body=extra, stream=True)
    next(iter(stream))
    os.kill(processes(served)[name], signal.SIGKILL)
    with pytest.raises(openai.APIError, match="what it kept is gone"):
        list(stream)
    with pytest.raises(openai.NotFoundError, match="its replica has gone"):
        turn(client, kept, "Are you there?")
    assert turn(client, one_of_each(served).popitem()[1], "Hello")


def test_who_goes_away_frees_its_replica(served: str, client: openai.OpenAI) -> None:
    stream = ask(client, "Go", max_tokens=1500, extra_body={"ignore_eos": True}, stream=True)
    next(iter(stream))
    assert sum(numbers(served, "flexinfer:num_requests_running").values()) == 1
    stream.close()
    deadline = time.monotonic() + 30
    while sum(numbers(served, "flexinfer:num_requests_running").values()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_commands_show_the_memory_of_one(served: str) -> None:
    for name in processes(served):
        shown = CliRunner().invoke(app, ["inspect", "--url", served, "--replica", name])
        assert f"replica   {name}, of " in shown.output
    said = CliRunner().invoke(app, ["chat", "--url", served], input="My dog is Rex.\n/memory\n")
    assert "My dog is" in said.output.partition("/memory")[2] or "Rex" in said.output


def test_errors_come_through(served: str, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        ask(client, "word " * 5000)
    assert httpx.get(f"{served}/ready", timeout=60).json() == {"status": "ready"}
