"""Turns: one thread at a time, and not always the same."""

from __future__ import annotations

import threading

from flexinfer.engine.turns import Turns
from helpers.waiting import until


def test_a_thread_that_waits_comes_before_the_one_that_asks_again() -> None:
    turns, order = Turns(), []

    def other() -> None:
        with turns:
            order.append("other")

    thread = threading.Thread(target=other)
    with turns:
        thread.start()
        until(lambda: is_held(turns._next), "the other thread to ask")
    with turns:
        order.append("again")
    thread.join()
    assert order == ["other", "again"]


def test_who_has_a_turn_may_ask_within_it_though_another_waits() -> None:
    """As a finalizer does that the garbage collector runs there."""
    turns = Turns()
    thread = threading.Thread(target=turns.__enter__)
    with turns:
        thread.start()
        until(lambda: is_held(turns._next), "the other thread to ask")
        with turns:
            pass
    thread.join()


def is_held(lock: threading.RLock) -> bool:  # type: ignore[valid-type]
    """By another thread."""
    is_free = lock.acquire(blocking=False)  # type: ignore[attr-defined]
    if is_free:
        lock.release()  # type: ignore[attr-defined]
    return not is_free
