"""Interrupts: Ctrl-C held back while the engine's state is under change.

Python raises KeyboardInterrupt between any two of its instructions: in the middle of a step, whose
other requests would be lost, or between a lock and its `try`, which nobody would ever release.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Interrupts:
    """Between `hold` and `let_go` a first Ctrl-C waits for `let_go`; a second one comes at once.

    Nothing happens in threads but the main one, which is the only one that Python interrupts.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._handler: Any = None
        self._num_held = 0

    def hold(self) -> None:
        """May be called again before `let_go`, which is then to be called as often."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._depth += 1
        if self._depth == 1:
            self._num_held = 0
            self._handler = signal.getsignal(signal.SIGINT)
            if callable(self._handler):
                signal.signal(signal.SIGINT, self._note)

    def let_go(self) -> None:
        """Calls the handler that there was, if there was a Ctrl-C: mostly, KeyboardInterrupt."""
        if threading.current_thread() is not threading.main_thread():
            return
        is_outermost = self._depth == 1 and callable(self._handler)
        try:
            if is_outermost:
                signal.signal(signal.SIGINT, self._handler)
        finally:
            self._depth -= 1
        if is_outermost and self._num_held == 1:
            self._handler(signal.SIGINT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._num_held += 1
        if self._num_held > 1:
            self._handler(number, frame)
