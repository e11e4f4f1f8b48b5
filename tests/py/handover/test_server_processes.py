"""Two `flexinfer serve`: one prefills, one decodes; the first is killed, and hangs, mid-way."""

from __future__ import annotations

import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")

import httpx

from flexinfer import LLM, SamplingParams
from flexinfer.cli.settings import SHIPPED_CHUNK_BYTES, SHIPPED_MODEL
from helpers.serving import ServerProcess

pytestmark = pytest.mark.slow
MEMORY = ("--kv-cache-memory-bytes", "64MiB", "--max-num-seqs", "8")


def prompt_of(number: int) -> list[int]:
    return [3 + (number * 131 + i * i * 7) % 1000 for i in range(900)]


def start(folder: Path, role: str, name: str) -> ServerProcess:
    flags = ("--role", role, "--handover-socket", str(folder / "kv.sock"), *MEMORY)
    if role == "decode":
        flags += ("--handover-timeout", "10")
    return ServerProcess(folder / name, *flags)


def ask(url: str, prompt: list[int]) -> list[int]:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 8, "return_token_ids": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


def metrics(url: str) -> dict[str, float]:
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    found = [line for line in lines if line.startswith("flexinfer:handover_")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in found}


def total(url: str, *words: str) -> float:
    return sum(v for name, v in metrics(url).items() if all(word in name for word in words))


def wait_for(url: str, count: float, *words: str) -> None:
    deadline = time.monotonic() + 60
    while total(url, *words) < count:
        assert time.monotonic() < deadline, metrics(url)
        time.sleep(0.01)


def test_a_partner_that_is_killed_and_one_that_hangs_cost_no_answer(tmp_path: Path) -> None:
    prompts = [prompt_of(number) for number in range(24)]
    with LLM(str(SHIPPED_MODEL), chunk_bytes=SHIPPED_CHUNK_BYTES) as single:
        greedy = SamplingParams(temperature=0, max_tokens=8)
        outputs = single.generate(prompts, greedy, use_tqdm=False)
        expected = [list(output.outputs[0].token_ids) for output in outputs]
    there, here = start(tmp_path, "prefill", "first"), start(tmp_path, "decode", "here")
    started: list[Any] = [there, here]
    threads = ThreadPoolExecutor(8)

    def send(first: int, last: int) -> list[Future[list[int]]]:
        return [threads.submit(ask, here.url, prompt) for prompt in prompts[first:last]]

    def check(answers: list[Future[list[int]]], first: int) -> None:
        assert [one.result() for one in answers] == expected[first : first + len(answers)]

    try:
        there.wait_until_ready()
        here.wait_until_ready()
        check(send(0, 4), 0)
        assert total(here.url, "parcels", "adopted") == 4
        assert total(there.url, "chunks_copied") == 0

        answers = send(4, 12)
        wait_for(here.url, 5, "parcels", "adopted")
        there.signal(signal.SIGKILL)
        check(answers, 4)
        wait_for(here.url, 1, "failures_total")

        again = start(tmp_path, "prefill", "second")
        started.append(again)
        again.wait_until_ready()
        adopted = total(here.url, "parcels", "adopted")
        check(send(12, 16), 12)
        assert total(here.url, "parcels", "adopted") == adopted + 4

        again.signal(signal.SIGSTOP)
        begin = time.monotonic()
        check(send(16, 24), 16)
        assert total(here.url, "failures", "slow") + total(here.url, "failures", "avoided") == 8
        assert time.monotonic() - begin < 60
        again.signal(signal.SIGCONT)
        assert httpx.get(f"{here.url}/health", timeout=60).status_code == 200
    finally:
        for process in started:
            process.__exit__()
        threads.shutdown()
