"""Turns: a lock for threads that each take it again and again.

Python's own locks go to whoever asks when they are free, mostly the thread that has just let go:
one that steps the engine would keep all others out until its requests have ended. Here a thread
that waits comes before the one that asks again.

Ctrl-C in a turn comes at its end (`Interrupts`).

Thread-safety: all of it. Re-entrant.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext

from flexinfer.engine.interrupts import Interrupts


class _Own(threading.local):
    depth = 0
    """Turns that the thread has, one within the other."""


class Turns:
    """
    with turns:
        ...  # one thread at a time
    turns.call(function)  # from anywhere, within a turn too: between two turns
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._next = threading.RLock()  # of the one thread that gets `_lock` when it is free
        self._own = _Own()
        self._calls: deque[Callable[[], object]] = deque()
        self._interrupts = Interrupts()

    def __enter__(self) -> None:
        depth = self._own.depth
        self._interrupts.hold()
        with nullcontext() if depth else self._next:
            self._lock.acquire()
            self._own.depth = depth + 1

    def __exit__(self, *_: object) -> None:
        try:
            while self._calls and self._own.depth == 1:
                self._calls.popleft()()
        finally:
            self._own.depth -= 1
            self._lock.release()
            self._make_calls()  # what has been asked for since
            self._interrupts.let_go()

    def call(self, function: Callable[[], object]) -> None:
        """Now or, while there is a turn, at its end, by the thread that has it.

        For finalizers: the garbage collector runs them wherever a thread is at, within its own turn
        as well, and with locks that the turn of another thread may need, so that this never waits.
        """
        self._calls.append(function)
        self._make_calls()

    def _make_calls(self) -> None:
        """In a turn for them, unless there is another, which makes them at its end."""
        self._interrupts.hold()
        if self._calls and not self._own.depth and self._lock.acquire(blocking=False):
            self._own.depth = 1
            self.__exit__()
        else:
            self._interrupts.let_go()
