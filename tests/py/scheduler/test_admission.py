"""Who is admitted with what memory, and what forks and swaps leave of that. No model."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("sortedcontainers")

from flexinfer import SamplingParams
from flexinfer.outputs import RequestMetrics
from flexinfer.scheduler.request import Request
from flexinfer.scheduler.scheduler import Scheduler
from scheduler.test_scheduler import (
    CHUNK_BYTES,
    TOKENS_PER_CHUNK,
    make_manager,
    make_request,
    make_scheduler,
    run_step,
    shape,
)


def scheduler_of(num_chunks: int, **settings: Any) -> Scheduler:
    """Without a cache and without mapping ahead: each chunk is somebody's need."""
    manager = make_manager(num_chunks, swap_space=num_chunks * CHUNK_BYTES)
    defaults: dict[str, Any] = {"enable_prefix_caching": False, "enable_pre_extend": False}
    defaults |= {"has_swap_space": True, "preemption_mode": "swap"}
    return make_scheduler(manager, **{**defaults, **settings})


def waiting(scheduler: Scheduler) -> list[str]:
    return [request.request_id for request in scheduler.waiting]


@pytest.mark.parametrize(("reserve", "is_admitted"), [(0.3, False), (0.2, True)])
def test_a_reserve_is_left_for_decodes_to_grow(reserve: float, is_admitted: bool) -> None:
    """Of 10 chunks 3 are taken, and the newcomer needs 5."""
    scheduler = scheduler_of(10, admission_reserve=reserve)
    scheduler.add(make_request("a", 3 * TOKENS_PER_CHUNK - 1))
    run_step(scheduler)
    scheduler.add(make_request("b", 5 * TOKENS_PER_CHUNK - 1))
    assert ("b" in shape(run_step(scheduler))) is is_admitted


@pytest.mark.parametrize(("num_chunks", "is_admitted"), [(5, False), (6, True)])
def test_what_a_prefill_was_promised_is_not_given_to_another(
    num_chunks: int, is_admitted: bool
) -> None:
    """The first fills 2 chunks and is promised one for its first output; the second needs 3."""
    scheduler = scheduler_of(num_chunks)
    scheduler.add(make_request("a", 2 * TOKENS_PER_CHUNK))
    scheduler.add(make_request("b", 3 * TOKENS_PER_CHUNK - 8))
    assert ("b" in shape(run_step(scheduler))) is is_admitted


@pytest.mark.parametrize(("num_chunks", "is_admitted"), [(6, False), (7, True)])
def test_a_group_is_admitted_with_room_for_a_tail_of_each_fork(
    num_chunks: int, is_admitted: bool
) -> None:
    """2 chunks run; the prompt needs 2, and each of its 3 forks one of its own."""
    scheduler = scheduler_of(num_chunks)
    scheduler.add(make_request("a", TOKENS_PER_CHUNK + 1))
    run_step(scheduler)
    scheduler.add(make_request("b", TOKENS_PER_CHUNK + 4, num_forks=3))
    assert ("b" in shape(scheduler.schedule())) is is_admitted


def test_slots_of_forks_to_come_are_spoken_for() -> None:
    """The second step computes the rest of the prompt, and could take the newcomer too."""
    scheduler = scheduler_of(40, max_num_seqs=4)
    scheduler.add(make_request("a", 100, num_forks=3))
    run_step(scheduler)
    scheduler.add(make_request("b", 5))
    assert set(shape(scheduler.schedule())) == {"a"}


def test_nothing_is_admitted_while_a_request_is_swapped_out() -> None:
    """There is room for the newcomer, and too little for the one that waits to come back."""
    scheduler = scheduler_of(5)
    for name in "ab":
        scheduler.add(make_request(name, 2 * TOKENS_PER_CHUNK - 2, max_tokens=40))
    while not scheduler.swapped:
        run_step(scheduler)
    scheduler.add(make_request("c", 5))
    assert set(shape(run_step(scheduler))) == {"a"}
    assert waiting(scheduler) == ["c"]
    assert scheduler.admission.has_room(CHUNK_BYTES, scheduler.running.values())


def test_the_last_token_of_a_recorded_prompt_is_computed() -> None:
    """Its logits are needed."""
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 40, first_token=0))
    run_step(scheduler)
    scheduler.add(make_request("again", 40, first_token=0))
    assert shape(run_step(scheduler))["again"] == (39, 40)


@pytest.mark.parametrize("num_new", [4, 0])
def test_a_request_that_needs_the_whole_budget_shares_what_leaves_room(
    num_new: int,
) -> None:
    """It continues a recorded prompt inside of a row, which would be there twice: recorded, and in
    a copy of its own."""
    scheduler = make_scheduler(make_manager(3))
    scheduler.add(make_request("a", 36, max_tokens=2, first_token=0))
    while scheduler.has_unfinished_requests():
        run_step(scheduler)
    longer = make_request("b", 36 + num_new, 8, tokens=[*range(36), *[9] * num_new])
    scheduler.add(longer)
    while scheduler.has_unfinished_requests():
        assert not run_step(scheduler).failed
    assert (longer.num_cached_tokens, longer.cache_limit) == (32, "memory")


def test_a_request_that_does_not_fit_is_told_numbers_that_say_so() -> None:
    """Its prompt is recorded up to the middle of a row, and the budget has become too small."""
    scheduler = make_scheduler(make_manager(3))
    scheduler.add(make_request("a", 36, max_tokens=2, first_token=0))
    while scheduler.has_unfinished_requests():
        run_step(scheduler)
    scheduler.manager.memory_budget = 2 * CHUNK_BYTES
    scheduler.add(make_request("b", 40, tokens=[*range(36), *[9] * 4]))
    (failed,) = run_step(scheduler).failed
    assert f"({3 * CHUNK_BYTES} bytes), but only {2 * CHUNK_BYTES}" in str(failed.stop_message)


def test_a_request_that_cannot_grow_is_told_what_it_has() -> None:
    scheduler = scheduler_of(3, preemption_mode="off")
    for name in "ab":
        scheduler.add(make_request(name, TOKENS_PER_CHUNK - 2, max_tokens=20))
    while not (batch := run_step(scheduler)).failed:
        pass
    message = str(batch.failed[0].stop_message)
    assert f"({2 * CHUNK_BYTES} bytes, of which it has {CHUNK_BYTES})" in message
    assert f"only {CHUNK_BYTES} bytes" in message
    assert "are available to all; 1 other requests run and preemption is off" in message


def test_a_fork_is_as_old_as_its_parent() -> None:
    """So it is preempted before what came before the parent did."""
    scheduler = scheduler_of(20)
    parent = make_request("parent", 8)
    child = parent.clone("child", 1, parent.params)
    for request in (make_request("first", 8), make_request("second", 8), parent):
        scheduler.add(request)
    scheduler.advance(scheduler.schedule())
    scheduler.fork(parent, child)
    second = scheduler.running["second"]
    assert scheduler.choose_victim([second, child]) is child


def test_a_request_tells_how_many_chunks_it_copied() -> None:
    """Two go on from one recorded prompt that ends inside a chunk: the second one copies it."""
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 20, first_token=0))
    run_step(scheduler)
    second = make_request("b", 24, max_tokens=2, first_token=0)
    scheduler.add(second)
    while not second.is_finished:
        run_step(scheduler)
    assert second.num_cached_tokens == 20
    assert second.metrics.chunks_copied == 1


def test_memory_is_mapped_ahead_again_after_a_swap() -> None:
    """What was mapped ahead has gone; its vTensor is asked for before the row falls due."""
    scheduler = scheduler_of(20, enable_pre_extend=True)
    request = make_request("a", TOKENS_PER_CHUNK - 2, max_tokens=40)
    scheduler.add(request)
    run_step(scheduler)
    scheduler.preempt(request, "growth")
    scheduler.manager.drain()
    before = scheduler.manager.mapping_times().pre_extended_rows
    assert set(shape(run_step(scheduler))) == {"a"}
    scheduler.manager.drain()
    assert scheduler.manager.mapping_times().pre_extended_rows == before + 1


def test_the_speed_of_swaps_is_learned_from_the_bytes_moved() -> None:
    scheduler = scheduler_of(20)
    request = make_request("a", TOKENS_PER_CHUNK)
    scheduler.add(request)
    run_step(scheduler)
    moved: list[int] = []
    scheduler.preemption.observe_swap = lambda num_bytes, _: moved.append(num_bytes)  # type: ignore[method-assign]
    scheduler.preempt(request, "growth")
    run_step(scheduler)
    assert moved == [CHUNK_BYTES, CHUNK_BYTES]  # out, and in


def test_a_stop_token_counts_from_min_tokens_on() -> None:
    request = Request(
        request_id="a",
        prompt_token_ids=[1],
        params=SamplingParams(min_tokens=2, stop_token_ids=[9]),
        max_num_tokens=100,
        metrics=RequestMetrics(arrival_time=0.0),
    )
    request.append(9)
    assert not request.is_finished
    request.append(9)
    assert (request.finish_reason, request.stop_reason) == ("stop", 9)
