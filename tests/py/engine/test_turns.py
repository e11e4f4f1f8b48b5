"""Turns: one thread at a time, and not always the same."""

from __future__ import annotations

import threading
from typing import Any

import pytest

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


def test_what_is_called_within_a_turn_is_made_at_its_end() -> None:
    """As a finalizer does that the garbage collector runs there."""
    turns, order = Turns(), []
    with turns:
        with turns:
            turns.call(lambda: order.append("called"))
        order.append("turn")
    assert order == ["turn", "called"]
    turns.call(lambda: order.append("at once"))
    assert order[-1] == "at once"


def test_a_call_waits_for_no_other_threads_turn() -> None:
    turns, order = Turns(), []
    caller = threading.Thread(target=turns.call, args=[lambda: order.append("called")])
    with turns:
        caller.start()
        caller.join(30)
        assert not caller.is_alive()
        order.append("turn")
    assert order == ["turn", "called"]


def test_a_call_that_fails_ends_the_turn() -> None:
    turns = Turns()
    with pytest.raises(ZeroDivisionError):
        turns.call(lambda: 1 / 0)
    thread = threading.Thread(target=turns.call, args=[lambda: None])
    with turns:
        thread.start()
        thread.join(30)
    assert not is_held(turns._lock)


def is_held(lock: Any) -> bool:
    """By another thread; lock: a threading.RLock, which is a function to type checkers."""
    is_free = lock.acquire(blocking=False)
    if is_free:
        lock.release()
    return not is_free
