"""RunningCalls: calls that wait for their results, and who waits for all of them to have theirs.

Thread-safety: all of it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class RunningCalls:
    """
    with calls.one():
        ...  # begins when nobody wants there to be none
    with calls.none():
        ...  # begins when those that run have ended; no other begins meanwhile
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_running = 0
        self._num_wanting_none = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._num_wanting_none)
            self._num_running += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_running -= 1
                self._changed.notify_all()

    @contextmanager
    def none(self) -> Iterator[None]:
        with self._changed:
            self._num_wanting_none += 1
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._num_running)
            yield
        finally:
            with self._changed:
                self._num_wanting_none -= 1
                self._changed.notify_all()
