"""How many sequences are served at once, and what those are told that are too many. No server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

pytest.importorskip("starlette")

from flexinfer.server.http import limits as limits_module
from flexinfer.server.http.errors import APIError
from flexinfer.server.http.limits import Limits


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_full_queue_takes_no_more(held: ExitStack) -> None:
    limits = Limits(num_running=2, num_waiting=1, per_key=None)
    held.enter_context(limits.hold("a", 2))
    with pytest.raises(APIError) as refused:
        held.enter_context(limits.hold("b", 2))
    assert refused.value.status_code == 429
    held.enter_context(limits.hold("b", 1))  # three are as many as may be


def test_a_key_has_as_many_as_it_may_and_no_more(held: ExitStack) -> None:
    limits = Limits(num_running=8, num_waiting=8, per_key=3)
    held.enter_context(limits.hold("a", 3))
    with pytest.raises(APIError, match="this API key has 3 sequences, of 3 at once"):
        held.enter_context(limits.hold("a", 1))
    held.enter_context(limits.hold("b", 3))  # another key's are its own


def test_what_has_ended_makes_room(held: ExitStack) -> None:
    limits = Limits(num_running=1, num_waiting=0, per_key=1)
    for _ in range(3):
        with limits.hold("a", 1):
            assert limits.num_active == 1
    assert limits.num_active == 0


@pytest.mark.parametrize(("num_waiting", "seconds"), [(4, 8), (10, 20), (100, 60)])
def test_retry_after_is_the_time_that_the_queue_takes(
    held: ExitStack, monkeypatch: pytest.MonkeyPatch, num_waiting: int, seconds: int
) -> None:
    """Five have ended within ten seconds; beside the two that run, so many wait."""
    now_s = [100.0]
    monkeypatch.setattr(limits_module.time, "monotonic", lambda: now_s[0])
    limits = Limits(num_running=2, num_waiting=num_waiting, per_key=None)
    held.enter_context(limits.hold("a", 2))
    for _ in range(5):
        with limits.hold("a", 1):
            now_s[0] += 2.0
    held.enter_context(limits.hold("a", num_waiting))
    with pytest.raises(APIError) as refused:
        held.enter_context(limits.hold("a", 1))
    assert refused.value.headers == {"Retry-After": str(seconds)}


def test_before_anything_has_ended_retry_after_goes_by_what_runs(
    held: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 at once have run for a second, and four times as many wait: not 256 seconds."""
    now_s = [100.0]
    monkeypatch.setattr(limits_module.time, "monotonic", lambda: now_s[0])
    limits = Limits(num_running=64, num_waiting=256, per_key=None)
    held.enter_context(limits.hold("a", 320))
    now_s[0] += 1.0
    assert limits.retry_after_s == 4
