"""A Ray cluster of one node by `ray start`, as a person has one; nothing is shared with others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

import httpx

from helpers.free_port import free_port
from helpers.waiting import until

BIN = Path(sys.executable).parent
STORE_BYTES = 256 << 20


@dataclass
class RayCluster:
    dashboard: str
    environment: dict[str, str]

    def serve(self, *arguments: str) -> str:
        """What `serve COMMAND ...` says."""
        command, *rest = arguments
        done = subprocess.run(
            [BIN / "serve", command, "-a", self.dashboard, *rest],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def is_up(self) -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.dashboard}/api/version", timeout=30).is_success
        return False


@contextmanager
def ray_cluster(num_cpus: int) -> Iterator[RayCluster]:
    folder = Path(mkdtemp(prefix="ray-"))  # a short path: sockets lie in it
    ports = [free_port() for _ in range(3)]
    flags = ("--port", "--dashboard-port", "--ray-client-server-port")
    command = [BIN / "ray", "start", "--head", "--block", "--num-cpus", str(num_cpus)]
    command += ["--temp-dir", str(folder), "--object-store-memory", str(STORE_BYTES)]
    command += [word for flag, port in zip(flags, ports, strict=True) for word in (flag, str(port))]
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": str(folder)}
    environment = {**os.environ, **quiet}
    with (folder / "log").open("w") as log:
        head = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        cluster = RayCluster(f"http://127.0.0.1:{ports[1]}", environment)
        until(lambda: head.poll() is not None or cluster.is_up(), "the cluster's dashboard")
        assert head.poll() is None, (folder / "log").read_text()
        yield cluster
    finally:
        head.send_signal(signal.SIGTERM)
        head.wait(90)
        rmtree(folder, ignore_errors=True)
