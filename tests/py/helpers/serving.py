"""Real servers for the tests: `flexinfer serve` as a process, or an app in a thread.

The process is what users run. The thread shares one loaded model, for tests that need settings of
their own, or must break the engine.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from flexinfer.async_llm import AsyncLLM
from flexinfer.cli.settings import SHIPPED_CHUNK_BYTES, SHIPPED_MODEL
from flexinfer.server.app import create_app
from flexinfer.server.run import bind
from flexinfer.server.settings import ServerSettings

START_TIMEOUT_S = 300
MODEL = "tiny_chat"
CONNECTIONS = httpx.Limits(keepalive_expiry=1.0)
"""Of clients that tests share. By default both sides give an idle connection up after 5 s, and the
server may do so while a request is on its way."""


class ServerProcess:
    """`flexinfer serve` on a free port, stopped at the end of the `with`."""

    def __init__(
        self,
        log: Path,
        *arguments: str,
        interpreter: tuple[str, ...] = ("-m", "flexinfer.cli"),
        **environment: str,
    ) -> None:
        """`interpreter`: what Python runs, if not the command line as it is."""
        self.log = log
        command = [sys.executable, *interpreter, "serve", "--port", "0", *arguments]
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, stderr=file, stdout=file, env={**os.environ, **environment}
            )
        self.url = ""

    def wait_until_ready(self) -> ServerProcess:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"the server has ended:\n{self.log.read_text()}"
            if found := re.search(r"Serving \S+ at ([^\s\"]+)", self.log.read_text(), re.MULTILINE):
                self.url = found[1]
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"{self.url}/ready", timeout=60).status_code == 200:
                        return self
            time.sleep(0.05)
        raise AssertionError(f"the server is not ready:\n{self.log.read_text()}")

    def wait_until_said(self, text: str) -> None:
        """In its log."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while text not in self.log.read_text():
            assert self.process.poll() is None, f"the server has ended:\n{self.log.read_text()}"
            assert time.monotonic() < deadline, f"{text!r} is not in {self.log.read_text()}"
            time.sleep(0.05)

    def __enter__(self) -> ServerProcess:
        return self

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 300) -> int:
        return self.process.wait(timeout_s)

    def __exit__(self, *_: object) -> None:
        """Stops it, however it is."""
        if self.process.poll() is None:
            self.signal()
            try:
                self.wait()
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.wait()


def settings(**changed: Any) -> ServerSettings:
    given: dict[str, Any] = {"served_model_names": (MODEL,), **changed}
    return ServerSettings(**given)


def make_llm(**changed: Any) -> AsyncLLM:
    """The shipped model."""
    given: dict[str, Any] = {
        "model": str(SHIPPED_MODEL),
        "chunk_bytes": SHIPPED_CHUNK_BYTES,
        "kv_cache_memory_bytes": 32 << 20,
        "max_num_seqs": 8,
        **changed,
    }
    return AsyncLLM(given.pop("model"), **given)


@contextlib.contextmanager
def serving(llm: AsyncLLM, server_settings: ServerSettings) -> Iterator[str]:
    """An app under uvicorn in a thread of this process; gives its URL."""
    sock = bind("127.0.0.1", 0)
    app = create_app(llm, server_settings)
    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "uvicorn has ended"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        sock.close()
