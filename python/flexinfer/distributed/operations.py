"""Operations: what rank 0 does with its vTensor manager, recorded, and done again on other ranks.

A manager is deterministic: the same operations in the same order give the same vTensors, slots and
prefixes. Three things are not, and are taken care of here:
1. the background worker: before the next operation it is waited for, so that it works beside the
   model and never beside an operation;
2. time: pins with a time to live are unpinned by an operation of rank 0's;
3. the system: a driver that fails on one rank gives another outcome there, which is noticed.

Each outcome is compared with rank 0's; books are compared as `books()` says. No torch.
"""

from __future__ import annotations

import hashlib
import threading
import time
from array import array
from collections.abc import Callable
from typing import Any

from flexinfer.distributed.token_table import Encoded, TokenTable

Operation = tuple[str, tuple[Any, ...], Any]
"""Name, arguments (tokens encoded), outcome."""

TOKEN_ARGUMENT = {
    "try_create": 0,
    "record_prefix": 1,
    "match_prefix": 0,
    "pin_prefix": 0,
    "try_swap_in": 1,
}
"""Operations with tokens, and which argument these are."""

OPERATIONS = frozenset(
    {
        *TOKEN_ARGUMENT,
        "evict",
        "extend",
        "forget",
        "pre_extend",
        "release",
        "set_busy",
        "reset_prefix_cache",
        "set_memory_budget",
        "sleep",
        "trim",
        "truncate",
        "try_extend",
        "try_fork",
        "try_swap_out",
        "unpin_prefix",
        "wake",
    }
)
"""Methods of the core that change what a manager holds."""
WAKES_WORKER = frozenset({"forget", "pre_extend", "set_busy"})
UNEQUAL_OUTCOMES = frozenset({"sleep"})
"""What the system really gave back differs from process to process."""
MAY_COME_LATE = frozenset({"release", "unpin_prefix"})
"""Called by destructors, also while another operation is under way."""


class DisagreementError(RuntimeError):
    """This rank's manager does not do what rank 0's did."""


class Performer:
    """Performs operations on a core one after the other, the worker idle in between."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self._is_worker_busy = False

    def perform(self, name: str, args: tuple[Any, ...]) -> Any:
        self.settle()
        self._is_worker_busy = name in WAKES_WORKER
        return getattr(self.core, name)(*args)

    def settle(self) -> None:
        """Wait for the worker."""
        if self._is_worker_busy:
            self.core.drain()
            self._is_worker_busy = False

    def books(self) -> str:
        """A digest of all that the manager holds: vTensors, chunks behind them, prefixes."""
        self.settle()
        shown = self.core.snapshot()
        entries: list[Any] = [
            (v.id, v.slot, v.state, v.num_tokens, v.num_cached_tokens, v.mapped_tokens, v.table)
            for v in shown.vtensors
        ]
        entries += [(c.id, c.refs, c.recorded, c.pinned, c.appender) for c in shown.chunks]
        entries += [
            (p.cache_salt, p.parent, p.start_tokens, p.num_tokens, p.last_used, p.first_tokens,
             p.chunks, p.pinned_by)
            for p in shown.prefixes
        ]  # fmt: skip
        return hashlib.sha256(repr(entries).encode()).hexdigest()


class RecordingCore:
    """In the place of rank 0's core: does what it is told, and keeps it for the other ranks.

    Thread-safety: full.
    """

    def __init__(self, core: Any, now: Callable[[], float] = time.monotonic) -> None:
        self._performer = Performer(core)
        self._core = core
        self._now = now
        self._table = TokenTable()
        self._operations: list[Operation] = []
        self._late: list[tuple[str, tuple[Any, ...]]] = []
        self._timed: list[tuple[float, str, str]] = []  # ends at, owner, name of the pin
        self._num_pins = 0
        self._lock = threading.RLock()
        self._is_busy = False  # by the thread that holds the lock

    def __getattr__(self, name: str) -> Any:
        if name in OPERATIONS:
            return lambda *args: self._record(name, args)
        return getattr(self._core, name)

    def view(self, *args: Any) -> Any:
        raise ValueError(
            "vTensors of a tensor-parallel engine have no tensor views: each rank holds the KV of "
            "its own heads"
        )

    def take(self) -> list[Operation]:
        """The operations since the last call."""
        with self._lock:
            taken, self._operations = self._operations, []
            return taken

    def books(self) -> str:
        """See `Performer.books`."""
        with self._lock:
            return self._performer.books()

    def pin_prefix(self, tokens: Any, owner: str, ttl_s: float, cache_salt: str) -> Any:
        """A pin with a time to live has a name of its own, by which it ends."""
        if not ttl_s > 0:
            return self._record("pin_prefix", (tokens, owner, 0.0, cache_salt))
        self._num_pins += 1
        name = f"{owner}#{self._num_pins}"
        self._timed.append((self._now() + ttl_s, owner, name))
        return self._record("pin_prefix", (tokens, name, 0.0, cache_salt))

    def unpin_prefix(self, owner: str) -> Any:
        names = [name for _, pinned_by, name in self._timed if pinned_by == owner]
        self._timed = [pin for pin in self._timed if pin[1] != owner]
        counts = [self._record("unpin_prefix", (name,)) for name in (*names, owner)]
        return sum(count or 0 for count in counts)

    def _record(self, name: str, args: tuple[Any, ...]) -> Any:
        with self._lock:
            if self._is_busy:
                if name not in MAY_COME_LATE:
                    raise RuntimeError(f"{name} inside of another operation")
                self._late.append((name, args))
                return None
            self._is_busy = True
            try:
                self._expire_pins()
                return self._perform(name, args)
            finally:
                while self._late:
                    self._perform(*self._late.pop(0))
                self._is_busy = False

    def _perform(self, name: str, args: tuple[Any, ...]) -> Any:
        sent = args
        where = TOKEN_ARGUMENT.get(name)
        if where is not None:
            data = memoryview(args[where]).tobytes()
            sent = (*args[:where], self._table.encode(data), *args[where + 1 :])
        try:
            result = self._performer.perform(name, args)
        except Exception as error:
            self._operations.append((name, sent, failure_of(error)))
            raise
        self._operations.append((name, sent, result))
        return result

    def _expire_pins(self) -> None:
        if not self._timed or self._core.is_asleep():
            return
        now = self._now()
        over = [pin for pin in self._timed if pin[0] <= now]
        if over:
            self._timed = [pin for pin in self._timed if pin[0] > now]
            for _, _, name in over:
                self._perform("unpin_prefix", (name,))


class Replica:
    """Another rank's manager: performs what was recorded, and compares the outcomes."""

    def __init__(self, core: Any) -> None:
        self._performer = Performer(core)
        self._table = TokenTable()

    def apply(self, operation: Operation) -> None:
        """Raises DisagreementError if the outcome is another one."""
        name, args, expected = operation
        where = TOKEN_ARGUMENT.get(name)
        if where is not None:
            args = (*args[:where], self._tokens(args[where]), *args[where + 1 :])
        try:
            outcome = self._performer.perform(name, args)
        except Exception as error:
            outcome, why = failure_of(error), f" ({error})"
        else:
            why = ""
        if outcome != expected and name not in UNEQUAL_OUTCOMES:
            raise DisagreementError(f"{name} gave {outcome!r}{why}, and {expected!r} on rank 0")

    def check(self, books: str) -> None:
        """Raises DisagreementError if this rank's books differ from rank 0's."""
        if self._performer.books() != books:
            raise DisagreementError("its books of vTensors, chunks and prefixes are not rank 0's")

    def _tokens(self, encoded: Encoded) -> array[int]:
        tokens = array("i")
        tokens.frombytes(self._table.decode(encoded))
        return tokens


def failure_of(error: Exception) -> str:
    """The outcome of an operation that raised."""
    return f"raised {type(error).__name__}"


def record_operations(manager: Any) -> RecordingCore:
    """Have what is done with this VTensorManager recorded from now on."""
    recording = RecordingCore(manager._core)
    manager._core = recording
    return recording
