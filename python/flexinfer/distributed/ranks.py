"""Ranks: rank 0's hold on the other processes of its engine.

A connection to each rank carries messages (messages.py); tensors go through torch.distributed. One
thread reads all connections: a rank that ends, for whatever reason, is known at once, also while
rank 0 waits in a collective or has nothing to do. The first failure ends the engine: the ranks that
are left are killed, so that no collective waits for them, and `failure` says which rank was it.

    a connection ends without a word    that rank has died
    a rank says why it fails            that rank, unless it only could not reach another
    nobody says anything in time        the rank that has not said that it waits hangs

Thread-safety: full.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait

from flexinfer.distributed.messages import Done, Failed, Loaded, Step, StepFailed, Stop
from flexinfer.errors import RankError

logger = logging.getLogger(__name__)

GRACE_S = 1.0
"""How long a cause is waited for once there is an effect."""
END_S = 2.0
"""How long ranks may take to end when they are told to."""


class Ranks:
    """The ranks 1, 2, ... of an engine, once they are connected."""

    def __init__(
        self, connections: dict[int, Connection], processes: dict[int, subprocess.Popen[bytes]]
    ) -> None:
        """processes: those started here, by rank."""
        self._connections = connections
        self._processes = processes
        self._changed = threading.Condition()
        self._num_done = dict.fromkeys(connections, 0)
        self._reports: dict[int, Failed] = {}
        self._failed_steps: dict[int, StepFailed] = {}  # of each rank the last
        self._failure: RankError | None = None
        self._is_closing = False
        self.on_failure: Callable[[], None] | None = None
        """Called once, by the reading thread, when a rank has failed."""
        self.weight_bytes: dict[int, int] = {}
        """Of each rank that has its weights."""
        self.sent_bytes = 0
        self.send_s = 0.0
        self.num_steps = 0
        self._reader = threading.Thread(target=self._read, name="flexinfer-ranks", daemon=True)
        self._reader.start()

    @property
    def failure(self) -> RankError | None:
        """Which rank has failed, and why; None: none."""
        return self._failure

    def check(self) -> None:
        """Raises RankError if a rank has failed."""
        if self._failure is not None:
            raise RankError(self._failure.rank, self._failure.message)

    def send(self, message: object) -> None:
        """To all ranks. Raises RankError."""
        self.check()
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        start_s = time.perf_counter()
        for rank, connection in self._connections.items():
            try:
                connection.send_bytes(data)
            except OSError:
                raise self._cause(rank, "has gone") from None
        if isinstance(message, Step) and message.plan is not None:
            self.send_s += time.perf_counter() - start_s
            self.sent_bytes += len(data)
            self.num_steps += 1

    def note_loaded(self, rank: int, loaded: Loaded) -> None:
        """A rank has its weights, rank 0 or another."""
        self.weight_bytes[rank] = loaded.num_bytes
        mib = loaded.num_bytes / 2**20
        logger.info("rank %d: %.1f MiB of weights after %.1f s", rank, mib, loaded.seconds)

    def wait_done(self, timeout_s: float) -> None:
        """Wait until each rank has said `Done` once more. Raises RankError."""
        with self._changed:
            if not self._changed.wait_for(self._is_answered, timeout_s):
                slow = next(rank for rank, number in self._num_done.items() if number < 1)
                self._fail(RankError(slow, f"has not answered for {timeout_s:g} s"))
            for rank in self._num_done:
                self._num_done[rank] -= 1
        self.check()

    def wait_step_failed(self, rank: int, number: int, timeout_s: float) -> str:
        """Why this rank could not compute its part of step `number`. Raises RankError."""

        def is_told() -> bool:
            told = self._failed_steps.get(rank)
            return self._failure is not None or (told is not None and told.number == number)

        with self._changed:
            if not self._changed.wait_for(is_told, timeout_s):
                self._fail(RankError(rank, f"has not said for {timeout_s:g} s why a step failed"))
        self.check()
        return self._failed_steps[rank].message

    def explain(self, error: Exception) -> RankError:
        """Which rank is to blame for an error of this one's collectives. The engine ends."""
        return self._cause(0, f"could not reach the others: {error}")

    def close(self) -> None:
        """End all ranks; returns when those started here have ended. May be called again."""
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
        if self._failure is None:
            for connection in self._connections.values():
                try:
                    connection.send(Stop())
                except OSError:
                    logger.debug("a rank has gone before it was told to", exc_info=True)
        deadline_s = time.monotonic() + END_S
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if threading.current_thread() is not self._reader:
            self._reader.join(END_S)
        for connection in self._connections.values():
            connection.close()

    def _is_answered(self) -> bool:
        return self._failure is not None or all(n > 0 for n in self._num_done.values())

    def _cause(self, rank: int, message: str) -> RankError:
        """The failure that is known in a moment, or else this one."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._failure is not None, GRACE_S):
                silent = [r for r in self._connections if r not in self._reports]
                if self._reports or rank == 0:
                    rank, message = (silent[0], "hangs") if silent else (rank, message)
                self._fail(RankError(rank, message))
            assert self._failure is not None
            return RankError(self._failure.rank, self._failure.message)

    # In the reading thread.

    def _read(self) -> None:
        open_ones = {connection: rank for rank, connection in self._connections.items()}
        victim_since_s: float | None = None
        while open_ones and not (self._is_closing and self._failure is not None):
            timeout_s = None if victim_since_s is None else 0.1
            for connection in wait(list(open_ones), timeout_s):
                assert isinstance(connection, Connection)
                rank = open_ones[connection]
                try:
                    message = connection.recv()
                except (EOFError, OSError, pickle.UnpicklingError):
                    del open_ones[connection]
                    self._note_end(rank)
                    continue
                self._note(rank, message)
            if victim_since_s is None and self._reports:
                victim_since_s = time.monotonic()
            if victim_since_s is not None and time.monotonic() - victim_since_s > 2 * GRACE_S:
                self._blame_victim()

    def _note(self, rank: int, message: object) -> None:
        if isinstance(message, Loaded):
            self.note_loaded(rank, message)
        elif isinstance(message, Done):
            with self._changed:
                self._num_done[rank] += 1
                self._changed.notify_all()
        elif isinstance(message, StepFailed):
            with self._changed:
                self._failed_steps[rank] = message
                self._changed.notify_all()
        elif isinstance(message, Failed):
            with self._changed:
                self._reports[rank] = message
                if not message.is_victim:
                    self._fail(RankError(rank, message.message))

    def _note_end(self, rank: int) -> None:
        with self._changed:
            if not self._is_closing and rank not in self._reports:
                self._fail(RankError(rank, self._how_ended(rank)))

    def _blame_victim(self) -> None:
        """Ranks could not reach others, and nobody has said why."""
        with self._changed:
            silent = [rank for rank in self._connections if rank not in self._reports]
            rank = silent[0] if silent else next(iter(self._reports))
            message = "hangs" if silent else self._reports[rank].message
            self._fail(RankError(rank, message))

    def _how_ended(self, rank: int) -> str:
        process = self._processes.get(rank)
        if process is None:
            return "has died: its connection is closed"
        try:
            code = process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            return "has closed its connection"
        return describe_exit(code)

    def _fail(self, error: RankError) -> None:
        """REQUIRES: `_changed` is held. Only the first failure counts."""
        if self._failure is not None:
            return
        self._failure = error
        logger.error("%s: the engine ends", error)
        for process in self._processes.values():
            process.kill()
        self._changed.notify_all()
        if self.on_failure is not None and not self._is_closing:
            self.on_failure()


def describe_exit(code: int) -> str:
    """How a process has ended."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"has ended with exit code {code}"


def inherited_environment() -> dict[str, str]:
    """For ranks started here: all but what names another distributed job."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in names}
