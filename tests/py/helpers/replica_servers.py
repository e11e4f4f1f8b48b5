"""`flexinfer serve --replicas 2` of the shipped model, as a process, and what it tells."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai

from helpers.free_port import free_port
from helpers.serving import MODEL

START_TIMEOUT_S = 150
SYSTEM = "You are asked about the sea, its fish and its ships, and answer in short words. " * 8


@contextmanager
def serving_replicas(folder: Path, *arguments: str) -> Iterator[str]:
    """The URL of two of them."""
    port, log = free_port(), folder / "log"
    command = [sys.executable, "-m", "flexinfer.cli", "serve", "--port", str(port)]
    command += ["--replicas", "2", "--kv-cache-memory-bytes", "64MiB", *arguments]
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


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120, max_retries=0)


def processes(url: str) -> dict[str, int]:
    """By the name of the replica, of those that answer."""
    page = httpx.get(f"{url}/metrics", timeout=60).text
    found = re.findall(r'^flexinfer:replica_process{.*pid="(\d+)",replica="(.+)"}', page, re.M)
    return {name: int(pid) for pid, name in found}


def numbers(url: str, name: str) -> dict[str, float]:
    """Of a metric, by the name of the replica."""
    page = httpx.get(f"{url}/metrics", timeout=60).text
    found = re.findall(rf'^{name}{{.*replica="(.+?)".*}} (\S+)$', page, re.MULTILINE)
    return {replica: float(value) for replica, value in found}


def running(url: str) -> int:
    """The process of the one replica that computes something."""
    counts = numbers(url, "flexinfer:num_requests_running")
    (busy,) = [name for name, count in counts.items() if count]
    return processes(url)[busy]


def messages_of(text: str) -> Any:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


def ask(client: openai.OpenAI, text: str, **given: Any) -> Any:
    given = {"model": MODEL, "max_tokens": 16, "temperature": 0, **given}
    return client.chat.completions.create(messages=messages_of(text), **given)
