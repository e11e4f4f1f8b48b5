"""Which adapters requests may start with, and that none waits for ever. No model."""

from __future__ import annotations

import pytest

pytest.importorskip("sortedcontainers")

from flexinfer.scheduler.adapter_turns import AdapterTurns
from flexinfer.scheduler.request import Request
from scheduler.test_scheduler import make_request, make_scheduler, run_step

A, B, C, D = 1, 2, 3, 4


def requests(*adapters: int) -> list[Request]:
    return [make_request(f"r{i}", 4, adapter=adapter) for i, adapter in enumerate(adapters)]


def started(max_loras: int, running: list[int], waiting: list[int]) -> list[int]:
    """Places in the queue of those that start."""
    turns = AdapterTurns(max_loras, requests(*running))
    found = []
    for i, request in enumerate(requests(*waiting)):
        if not turns.waits(request):
            turns.start(request)
            found.append(i)
    return found


@pytest.mark.parametrize(
    ("running", "waiting", "expected"),
    [
        ([A, B, A], [C, A, B], [1]),  # B is closed
        ([A, B, A], [B, C, A, B], [0, 3]),  # A is: its newest is older once a B has started
        ([A, B, A], [A, B], [0, 1]),  # nobody waits
        ([A, B], [C, D, A, B], [3]),  # one is closed, however many wait
        ([A, B], [C, 0, 0], [1, 2]),
        ([A], [B, A, B, C, A, B], [0, 1, 2, 5]),
        ([0, 0], [A, B, C], [0, 1]),
    ],
)
def test_later_requests_pass_one_that_waits_for_a_place_but_for_one_adapter(
    running: list[int], waiting: list[int], expected: list[int]
) -> None:
    assert started(2, running, waiting) == expected


@pytest.mark.parametrize("policy", ["fcfs", "priority", "prefix"])
@pytest.mark.parametrize("max_loras", [1, 2])
def test_a_stream_for_other_adapters_keeps_no_place_for_ever(max_loras: int, policy: str) -> None:
    """One for each of them arrives long before the last one has ended: it waits for what runs."""
    scheduler = make_scheduler(max_loras=max_loras, scheduling_policy=policy)
    waiting = make_request("waiting", 4, max_tokens=5, adapter=C)
    for step in range(120):
        if step % 20 == 0:
            for adapter in (A, B)[:max_loras]:
                name = f"{adapter}-{step}"
                scheduler.add(make_request(name, 4, max_tokens=50, adapter=adapter))
        if step == 45:
            scheduler.add(waiting)
        run_step(scheduler)
    assert waiting.finish_reason == "length"


def test_others_go_on_while_one_waits_for_a_place() -> None:
    scheduler = make_scheduler(max_loras=2)
    for name, adapter in (("a", A), ("b", B), ("c", C), ("b2", B), ("plain", 0), ("a2", A)):
        length = 5 if adapter == A else 9
        scheduler.add(make_request(name, 4, max_tokens=length, adapter=adapter))
    run_step(scheduler)
    assert list(scheduler.running) == ["a", "b", "b2", "plain"]
    while "a" in scheduler.running:
        run_step(scheduler)
    run_step(scheduler)
    assert list(scheduler.running) == ["b", "b2", "plain", "c"]
