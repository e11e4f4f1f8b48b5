"""When streams get an output: each token with few streams, joined ones with many, none late."""

from __future__ import annotations

import random

import pytest

from flexinfer.engine.stream_pace import MAX_DELAY_S, MAX_EVENTS_PER_S, StreamPace


def shown_steps(pace: StreamPace, step_s: float, num_streams: int, num_steps: int) -> list[int]:
    """Of steps that follow each other, those after which streams get an output."""
    out = []
    for step in range(1, num_steps + 1):
        pace.end_step(num_streams, 100.0 + step * step_s)
        if pace.is_due(1):
            out.append(step)
    return out


def test_a_given_interval_counts_tokens_whatever_the_load() -> None:
    pace = StreamPace(3)
    pace.end_step(1000, 1.0)
    assert [pace.is_due(count) for count in range(1, 5)] == [False, False, True, True]


@pytest.mark.parametrize(
    ("num_streams", "step_s"), [(1, 0.005), (4, 0.011), (16, 0.041), (64, 0.11)]
)
def test_few_streams_or_slow_steps_get_each_token(num_streams: int, step_s: float) -> None:
    assert shown_steps(StreamPace(None), step_s, num_streams, 6) == [1, 2, 3, 4, 5, 6]


def test_many_streams_get_tokens_together() -> None:
    assert shown_steps(StreamPace(None), 0.017, 32, 12) == [1, 3, 5, 7, 9, 11]
    assert shown_steps(StreamPace(None), 0.009, 32, 20) == [1, 5, 9, 13, 17]


def test_a_pause_opens_the_next_step() -> None:
    pace = StreamPace(None)
    shown_steps(pace, 0.017, 32, 3)
    pace.end_step(32, 200.0)
    assert pace.is_due(1)


@pytest.mark.parametrize("seed", range(5))
def test_no_token_waits_longer_than_the_bound_and_events_are_few(seed: int) -> None:
    """Steps differ by a tenth: that much a wait may exceed the bound, whose end is foretold."""
    draw = random.Random(seed)
    num_streams = draw.randint(1, 200)
    step_s = draw.uniform(0.0005, 0.045)
    pace = StreamPace(None)
    now_s, waiting_since_s, shown_s, longest_s = 5.0, None, 0.0, 0.0
    for _ in range(2000):
        now_s += step_s * draw.uniform(0.95, 1.05)
        pace.end_step(num_streams, now_s)
        waiting_since_s = waiting_since_s or now_s
        if pace.is_due(1):
            is_rare = now_s - shown_s >= num_streams / MAX_EVENTS_PER_S
            assert is_rare or now_s + step_s * 1.1 - waiting_since_s > MAX_DELAY_S
            longest_s = max(longest_s, now_s - waiting_since_s)
            waiting_since_s, shown_s = None, now_s
    assert longest_s <= MAX_DELAY_S + step_s * 0.1
