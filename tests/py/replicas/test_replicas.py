"""Two replicas of the shipped model on a real cluster of this machine: answers, routes, deaths."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from flexinfer import LLM
from flexinfer.cli.settings import SHIPPED_CHUNK_BYTES, SHIPPED_MODEL
from flexinfer.sampling_params import SamplingParams
from helpers.free_port import free_port
from helpers.serving import MODEL

pytest.importorskip("ray", reason="replicas need Ray: make test-replicas installs it")
pytestmark = pytest.mark.slow

START_TIMEOUT_S = 150
SYSTEM = "You are asked about the sea, its fish and its ships, and answer in short words. " * 8


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of `flexinfer serve --replicas 2`."""
    port = free_port()
    log = tmp_path_factory.mktemp("ray") / "log"
    command = [sys.executable, "-m", "flexinfer.cli", "serve", "--port", str(port)]
    command += ["--replicas", "2", "--kv-cache-memory-bytes", "64MiB"]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while "Serving tiny_chat at" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 0, log.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def client(served: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served}/v1", api_key="none", timeout=120, max_retries=0)


def numbers(served: str, name: str) -> dict[int, float]:
    """Of a metric, by the process of the replica."""
    page = httpx.get(f"{served}/metrics", timeout=60).text
    found = re.findall(rf'^{name}{{.*replica="[^"]*:(\d+)".*}} (\S+)$', page, re.MULTILINE)
    return {int(pid): float(value) for pid, value in found}


def ask(client: openai.OpenAI, text: str, **given: Any) -> Any:
    messages: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    given = {"max_tokens": 16, "temperature": 0, **given}
    return client.chat.completions.create(model=MODEL, messages=messages, **given)


@pytest.fixture(scope="module")
def expected() -> str:
    """A long greedy answer by one engine alone."""
    with LLM(str(SHIPPED_MODEL), chunk_bytes=SHIPPED_CHUNK_BYTES) as llm:
        messages: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Go"}]
        params = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)
        (output,) = llm.chat(messages, params)
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
