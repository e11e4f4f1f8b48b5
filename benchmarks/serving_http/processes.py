"""The processes that are measured: a server behind a URL, and the offline engine behind a pipe.

Both tell their CPU time and their peak memory, children included.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
START_TIMEOUT_S = 400  # vLLM compiles its model
STOP_TIMEOUT_S = 30
LOG_TAIL_CHARS = 2000


def busy_cpu_s() -> float:
    """CPU time of all processes of this machine so far."""
    times = psutil.cpu_times()
    return float(times.user + times.system + times.nice + times.irq + times.softirq)


class Measured:
    """A child process; leaving its `with` block ends it."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, **pipes: Any
    ) -> None:
        self.log = log
        with log.open("w") as file:
            pipes = {"stdout": file, **pipes}
            self.process = subprocess.Popen(
                list(command), stderr=file, env={**os.environ, **environment}, text=True, **pipes
            )
        self._peaks_mib: dict[int, float] = {}

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.process.terminate()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            for one in self._tree():
                one.kill()
            self.process.wait()

    def pids(self) -> list[int]:
        """Its own, and those of its children."""
        return [one.pid for one in self._tree()]

    def cpu_s(self) -> float:
        """User and system time so far."""
        times = [one.cpu_times() for one in self._tree()]
        return float(sum(one.user + one.system for one in times))

    def thread_cpu_s(self, name: str | None = None) -> float:
        """Of one thread of the first process: the one called so; None: the first one, which in
        `flexinfer serve` speaks HTTP and in offline.py computes. 0 if there is no such thread."""
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            is_first = task.name == str(self.process.pid)
            if is_first if name is None else (task / "comm").read_text().strip() == name:
                return int((task / "schedstat").read_text().split()[0]) / 1e9
        return 0.0

    def peak_mib(self) -> float:
        """Sum of the peak resident memory of each process that is alive, or was at a call before:
        more than the peak of the sum if they came at different times."""
        for one in self._tree():
            status = Path(f"/proc/{one.pid}/status").read_text()
            line = next((row for row in status.splitlines() if row.startswith("VmHWM:")), "- 0")
            self._peaks_mib[one.pid] = int(line.split()[1]) / 1024
        return sum(self._peaks_mib.values())

    def fail(self, what: str) -> RuntimeError:
        return RuntimeError(f"{what}; the end of {self.log}:\n{self._log_tail()}")

    def _log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-LOG_TAIL_CHARS:]

    def _tree(self) -> list[psutil.Process]:
        first = psutil.Process(self.process.pid)
        return [first, *first.children(recursive=True)]


class Server(Measured):
    """A server with OpenAI's interface; ready once made. `command` ends with `--port`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        port = free_port()
        super().__init__([*command, str(port)], environment, log)
        self.url = f"http://127.0.0.1:{port}"
        try:
            self.model = self._wait_until_ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def _wait_until_ready(self) -> str:
        """The name of the model."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if self.process.poll() is not None:
                raise self.fail(f"{self.process.args[0]} has ended")  # type: ignore[index]
            try:
                with urllib.request.urlopen(f"{self.url}/v1/models", timeout=5) as answer:
                    return str(json.load(answer)["data"][0]["id"])
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise self.fail(f"no answer from {self.url} in {START_TIMEOUT_S} s")


class Offline(Measured):
    """FlexInfer's offline engine: offline.py."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        command = [sys.executable, str(HERE / "offline.py"), *arguments]
        super().__init__(
            command, environment, log, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=1
        )

    def generate(self, prompts: list[list[int]], num_new: int) -> dict[str, Any]:
        """What offline.py answers: `seconds`, `texts`, `num_new_tokens`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "num_new": num_new}) + "\n")
        for line in self.process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise self.fail("the offline engine has ended")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
