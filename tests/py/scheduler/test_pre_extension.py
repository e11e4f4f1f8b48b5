"""How far ahead memory is mapped: the numbers, and what the worker is asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sortedcontainers")

from flexinfer.scheduler.batch import ScheduledRequest
from flexinfer.scheduler.pre_extension import ExtensionDepth, PreExtender
from flexinfer.scheduler.request import Request
from scheduler.test_scheduler import make_request


def learned(
    *, step_us: float, map_us_per_row: float, burst_rows: int, tokens_per_row: float = 1000
) -> ExtensionDepth:
    depth = ExtensionDepth(tokens_per_row)
    for _ in range(50):
        depth.observe_step(step_us, map_us_per_row * 3, 3)
        depth.observe_growth(burst_rows)
    return depth


def test_before_anything_is_known_two_tokens_are_mapped_ahead() -> None:
    assert ExtensionDepth(tokens_per_row=16).tokens == 2


@pytest.mark.parametrize(
    ("step_us", "map_us_per_row", "burst_rows", "tokens"),
    [
        (30_000, 100, 1, 1),  # 0.2 ms of work in a step of 30 ms
        (30_000, 100, 150, 1),  # 2 x 15 ms: exactly one step
        (30_000, 100, 151, 2),
        (30_000, 100, 640, 5),  # 2 x 64 ms
        (1_000, 250, 8, 4),
        (1_000, 250, 0, 1),
    ],
)
def test_depth_gives_the_worker_twice_the_time_that_a_burst_takes(
    step_us: float, map_us_per_row: float, burst_rows: int, tokens: int
) -> None:
    depth = learned(step_us=step_us, map_us_per_row=map_us_per_row, burst_rows=burst_rows)
    assert depth.tokens == tokens


def test_never_more_than_a_row_of_chunks_lies_idle_ahead() -> None:
    depth = learned(step_us=10, map_us_per_row=1000, burst_rows=64, tokens_per_row=16.5)
    assert depth.steps > 1000
    assert depth.tokens == 16


def test_mapping_times_that_vary_ask_for_more_lead_than_their_mean() -> None:
    steady = learned(step_us=1_000, map_us_per_row=500, burst_rows=2)
    varying = learned(step_us=1_000, map_us_per_row=500, burst_rows=2)
    for idx in range(50):
        varying.observe_step(1_000, 50 if idx % 2 else 950, 1)
    assert steady.tokens == 2
    assert 6 <= varying.tokens <= 12


def test_depth_follows_a_slower_step() -> None:
    depth = learned(step_us=1_000, map_us_per_row=250, burst_rows=8)
    for _ in range(40):
        depth.observe_step(5_000, 250, 1)
    assert depth.tokens == 1


def test_a_burst_is_forgotten_slowly() -> None:
    depth = learned(step_us=1_000, map_us_per_row=250, burst_rows=16)
    for _ in range(10):
        depth.observe_growth(0)
    assert depth.tokens == 7  # of 8
    for _ in range(400):
        depth.observe_growth(0)
    assert depth.tokens == 1


def test_several_tokens_a_step_need_as_many_more() -> None:
    depth = learned(step_us=1_000, map_us_per_row=250, burst_rows=4)
    for _ in range(50):
        depth.observe_growth(4, tokens_per_step=3.0)
    assert depth.tokens == 6


def test_a_step_that_mapped_nothing_teaches_nothing_about_mapping() -> None:
    depth = learned(step_us=1_000, map_us_per_row=250, burst_rows=4)
    depth.observe_step(1_000, 900, 0)
    assert depth.map_us_per_row == pytest.approx(250)


def asked(request: Request, end: int, max_step_tokens: int = 64) -> list[int]:
    """Up to which tokens the worker is asked to map, 16 a row, in a step that ends at `end`."""
    found: list[int] = []
    manager: Any = SimpleNamespace(
        spec=SimpleNamespace(plane_token_bytes=1, windows=()),
        chunk_bytes=16,
        pre_extend=lambda vtensors, targets: found.extend(targets),
        set_busy=lambda busy: None,
    )
    vtensor: Any = None
    item = ScheduledRequest(request, vtensor, request.num_computed_tokens, end, True)
    PreExtender(manager, max_step_tokens).ask([item])
    return found


def decoding(num_tokens: int, max_tokens: int = 100, num_asked_rows: int = 0) -> Request:
    request = make_request("a", num_tokens, max_tokens=max_tokens)
    request.num_computed_tokens = request.num_prefill_tokens = num_tokens - 1
    request.num_asked_rows = num_asked_rows
    return request


@pytest.mark.parametrize(("num_prompt", "end", "target"), [(100, 30, 94), (100, 40, 116)])
def test_a_prefill_asks_for_its_next_chunk_and_at_its_end_for_a_row_more(
    num_prompt: int, end: int, target: int
) -> None:
    request = make_request("a", num_prompt, max_tokens=100)
    request.num_prefill_tokens = num_prompt
    assert asked(request, end) == [target]


def test_a_decode_asks_again_when_its_next_token_needs_a_row() -> None:
    """Not one token later, when a step would have to wait."""
    assert asked(decoding(16, num_asked_rows=9), 16) == [18]
    assert asked(decoding(17, num_asked_rows=9), 17) == []


def test_nobody_asks_beyond_the_end_of_a_request() -> None:
    assert asked(decoding(16, max_tokens=2), 16) == [17]  # the last token needs no memory
