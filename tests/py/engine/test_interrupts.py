"""Interrupts: Ctrl-C comes at the end of what must not be broken off."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from flexinfer.engine.interrupts import Interrupts


@pytest.fixture(autouse=True)
def _ctrl_c_raises() -> Iterator[None]:
    """It is ignored where a shell started us in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def test_the_first_comes_at_the_end() -> None:
    interrupts = Interrupts()
    interrupts.hold()
    interrupts.hold()
    signal.raise_signal(signal.SIGINT)
    interrupts.let_go()
    with pytest.raises(KeyboardInterrupt):
        interrupts.let_go()


def test_a_second_comes_at_once_and_no_third_at_the_end() -> None:
    interrupts = Interrupts()
    interrupts.hold()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    interrupts.let_go()


def test_each_hold_counts_anew() -> None:
    interrupts = Interrupts()
    for _ in range(2):
        interrupts.hold()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupts.let_go()


def test_a_ctrl_c_that_is_ignored_stays_so() -> None:
    interrupts = Interrupts()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        interrupts.hold()
        signal.raise_signal(signal.SIGINT)
        interrupts.let_go()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_leave_the_main_ones_alone() -> None:
    interrupts = Interrupts()
    thread = threading.Thread(target=interrupts.hold)
    thread.start()
    thread.join()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
