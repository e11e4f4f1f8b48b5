"""until(): waiting for what comes to be in another thread or process, however slow the machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 120.0


def until(condition: Callable[[], T], what: str, timeout_s: float = PATIENCE_S) -> T:
    """The first true value of `condition`. Raises AssertionError, which says what did not come."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s in vain for {what}"
        time.sleep(0.005)
    return found
