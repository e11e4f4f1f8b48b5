"""The server under the soak: `flexinfer serve` as a process, and what that process holds."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

ADMIN_KEY = "soak-admin"
START_TIMEOUT_S = 120


class SoakServer:
    """URL and process of a server that runs. All numbers are the kernel's, not the server's own."""

    def __init__(self, url: str, process: subprocess.Popen[bytes]) -> None:
        self.url = url
        self._process = process
        self._proc = Path("/proc") / str(process.pid)

    def anonymous_bytes(self) -> int:
        """Resident set without shared memory: the KV pool is a memfd, and changes with the
        budget."""
        status = (self._proc / "status").read_text()
        found = re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
        return int(found[1]) << 10 if found else 0

    def pool_bytes(self) -> int:
        """Physical memory behind the KV pool's memfd."""
        return sum(
            os.stat(file).st_blocks * 512 for file, name in self._files() if "memfd:" in name
        )

    def num_files(self) -> int:
        """Open files and sockets."""
        return sum(1 for _ in self._files())

    def num_threads(self) -> int:
        return sum(1 for _ in (self._proc / "task").iterdir())

    def _files(self) -> Iterator[tuple[str, str]]:
        for entry in (self._proc / "fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                yield str(entry), os.readlink(entry)


@contextmanager
def soak_server(*arguments: str) -> Iterator[SoakServer]:
    """The shipped model on a free port. Raises RuntimeError unless it starts, lives on, and ends
    with 0 when it is asked to."""
    command = [sys.executable, "-m", "flexinfer.cli", "serve", "--port", "0", *arguments]
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        process = subprocess.Popen(
            [*command, "--log-level", "warning"],
            stderr=log,
            stdout=log,
            env={**os.environ, "FLEXINFER_ADMIN_API_KEY": ADMIN_KEY},
        )
        try:
            yield SoakServer(_wait_until_ready(process, Path(log.name)), process)
            process.send_signal(signal.SIGTERM)
            if process.wait(60) != 0:
                raise RuntimeError(
                    f"the server ended with {process.returncode}:\n{_tail(log.name)}"
                )
        except httpx.TransportError as error:
            raise RuntimeError(f"the server has gone:\n{_tail(log.name)}") from error
        finally:
            process.kill()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        if found := re.search(r"Serving \S+ at ([^\s\"]+)", log.read_text(), re.MULTILINE):
            try:
                if httpx.get(f"{found[1]}/ready", timeout=60).status_code == 200:
                    return found[1]
            except httpx.TransportError:
                pass
        time.sleep(0.1)
    raise RuntimeError(f"the server has not started:\n{log.read_text()}")


def _tail(log: str) -> str:
    return Path(log).read_text()[-4000:]


def counters(exposition: str) -> Counter[str]:
    """The counters of GET /metrics, summed over their labels; with one label left where it says
    why: `preemptions.recompute`, `request_success.stop`."""
    sums: Counter[str] = Counter()
    pattern = re.compile(r"^flexinfer:(\w+)_total\{(.*)\} (\S+)$", re.MULTILINE)
    for name, labels, value in pattern.findall(exposition):
        reason = re.search(r'(?:mode|finished_reason)="(\w+)"', labels)
        sums[f"{name}.{reason[1]}" if reason else name] += round(float(value))
    return sums
