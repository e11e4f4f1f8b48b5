"""Turns: a lock for threads that each take it again and again.

Python's own locks go to whoever asks when they are free, mostly the thread that has just let go:
one that steps the engine would keep all others out until its requests have ended. Here a thread
that waits comes before the one that asks again.

Thread-safety: all of it. Re-entrant, also from a finalizer that the garbage collector runs.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext


class Turns:
    """
    with turns:
        ...  # one thread at a time
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._next = threading.RLock()  # of the one thread that gets `_lock` when it is free
        self._own = threading.local()

    def __enter__(self) -> None:
        depth = getattr(self._own, "depth", 0)
        with nullcontext() if depth else self._next:
            self._lock.acquire()
            self._own.depth = depth + 1

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self._own.depth -= 1
