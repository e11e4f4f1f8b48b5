"""Ranks forked from one process that has loaded their libraries, which alone takes seconds.

    test  -- who to be -->  nursery  -- fork, fork -->  rank: the test's own child from then on

As a program it is the nursery.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from types import TracebackType
from typing import Any

PR_SET_CHILD_SUBREAPER = 36


class Nursery:
    """In the place of `flexinfer.distributed.group._spawn`, by its `spawn`."""

    def __enter__(self) -> Nursery:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of ours are our children
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"
        return self

    def spawn(self, meeting: Any) -> Rank:
        """A rank that is called to this meeting."""
        from flexinfer.distributed import group

        assert self._process.stdin is not None
        assert self._process.stdout is not None
        variable = json.dumps([group.VARIABLE, json.dumps(group.vars_of(meeting))])
        self._process.stdin.write(variable.encode() + b"\n")
        self._process.stdin.flush()
        return Rank(int(self._process.stdout.readline()))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0)


class Rank:
    """What `Ranks` asks of a subprocess.Popen, of a child that this process has not started."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = os.pidfd_open(pid)

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        import select

        if self.returncode is None and not select.select([self._ended], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        code = self._reap(0)
        assert code is not None
        return code

    def kill(self) -> None:
        if self.returncode is None:
            signal.pidfd_send_signal(self._ended, signal.SIGKILL)

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            ended = os.waitid(os.P_PIDFD, self._ended, os.WEXITED | options)
            if ended is not None:
                os.close(self._ended)
                code = ended.si_status
                self.returncode = code if ended.si_code == os.CLD_EXITED else -code
        return self.returncode


def main() -> None:
    """For each line a rank."""
    import torch
    import transformers
    from transformers.models.llama import modeling_llama

    import flexinfer.distributed.rank
    import flexinfer.models.loading
    import flexinfer.runner.model_runner

    loaded = torch, transformers, modeling_llama, flexinfer.models.loading, flexinfer.runner
    assert all(loaded)
    print("ready", flush=True)
    for line in sys.stdin:
        name, value = json.loads(line)
        if os.fork():
            os.wait()
            continue
        between = os.getpid()
        if pid := os.fork():
            print(pid, flush=True)
            os._exit(0)
        while os.getppid() == between:  # a rank ends with the parent that it finds at its start
            time.sleep(0.001)
        sys.stdin.close()
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        os.environ[name] = value
        flexinfer.distributed.rank.serve_rank()
        os._exit(0)


if __name__ == "__main__":
    main()
