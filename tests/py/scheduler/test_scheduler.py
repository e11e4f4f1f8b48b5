"""The scheduler on the sim driver: order, token budget, memory, preemption, sharing. No model."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("sortedcontainers")

from flexinfer import SamplingParams
from flexinfer.outputs import RequestMetrics
from flexinfer.scheduler.request import Request
from flexinfer.scheduler.scheduler import Batch, Scheduler
from flexinfer.scheduler_config import SchedulerConfig
from flexinfer.vtensor import KVSpec, VTensorManager
from helpers.idle_manager import available_bytes

CHUNK_BYTES = 2 << 20
TOKENS_PER_CHUNK = 16


def make_manager(num_chunks: int = 1000, max_requests: int = 8, **options: Any) -> VTensorManager:
    """Interleaved layout in which a chunk holds TOKENS_PER_CHUNK tokens."""
    spec = KVSpec(
        num_layers=8,
        num_kv_heads=32,
        head_dim=64,
        dtype="float32",
        max_seq_len=512,
    )
    assert spec.bytes_per_token * TOKENS_PER_CHUNK == CHUNK_BYTES
    return VTensorManager(
        spec,
        device="sim",
        max_requests=max_requests,
        memory_budget=num_chunks * CHUNK_BYTES,
        chunk_bytes=CHUNK_BYTES,
        **options,
    )


def make_scheduler(manager: VTensorManager | None = None, **settings: Any) -> Scheduler:
    defaults: dict[str, Any] = {
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "admission_reserve": 0.0,
    }
    return Scheduler(
        SchedulerConfig(**{**defaults, **settings}),
        manager or make_manager(max_requests=settings.get("max_num_seqs", 8)),
    )


def make_request(name: str, num_prompt: int, max_tokens: int = 10, **options: Any) -> Request:
    first = options.pop("first_token", sum(map(ord, name)) * 1000)
    return Request(
        request_id=name,
        prompt_token_ids=options.pop("tokens", list(range(first, first + num_prompt))),
        params=SamplingParams(max_tokens=max_tokens),
        max_num_tokens=num_prompt + max_tokens,
        metrics=RequestMetrics(arrival_time=0.0),
        **options,
    )


def run_step(scheduler: Scheduler) -> Batch:
    """One engine step with a model that always says 7."""
    batch = scheduler.schedule()
    scheduler.pre_extend(batch)
    scheduler.advance(batch)
    for item in batch.items:
        if item.samples:
            item.request.append(7)
            if item.request.is_finished:
                scheduler.finish(item.request)
    scheduler.manager.check_integrity()
    return batch


def shape(batch: Batch) -> dict[str, tuple[int, int]]:
    return {item.request.request_id: (item.start, item.end) for item in batch.items}


def test_waiting_requests_go_by_priority_then_arrival() -> None:
    scheduler = make_scheduler()
    for name, priority in [("late", 5), ("b", 0), ("c", 0), ("first", -1)]:
        scheduler.add(make_request(name, 4, priority=priority))
    assert [i.request.request_id for i in scheduler.schedule().items] == ["first", "b", "c", "late"]


def test_decodes_go_before_prefills_within_the_token_budget() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    scheduler.add(make_request("a", 4))
    run_step(scheduler)
    scheduler.add(make_request("b", 40))
    assert shape(run_step(scheduler)) == {"a": (4, 5), "b": (0, 15)}
    assert shape(run_step(scheduler)) == {"a": (5, 6), "b": (15, 30)}
    assert shape(run_step(scheduler)) == {"a": (6, 7), "b": (30, 40)}
    assert shape(run_step(scheduler)) == {"a": (7, 8), "b": (40, 41)}


def test_without_chunked_prefill_a_prompt_waits_for_a_whole_step() -> None:
    scheduler = make_scheduler(
        enable_chunked_prefill=False, max_num_batched_tokens=100, max_model_len=100
    )
    scheduler.add(make_request("a", 60))
    scheduler.add(make_request("b", 60))
    assert shape(run_step(scheduler)) == {"a": (0, 60)}
    assert shape(run_step(scheduler)) == {"a": (60, 61), "b": (0, 60)}


def test_max_num_seqs_bounds_the_running_requests() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_request(name, 4, max_tokens=2))
    assert set(shape(run_step(scheduler))) == {"a", "b"}
    assert set(shape(run_step(scheduler))) == {"a", "b"}
    assert set(shape(run_step(scheduler))) == {"c"}


def test_admission_claims_the_whole_prefill_at_once_or_not_at_all() -> None:
    scheduler = make_scheduler(make_manager(num_chunks=5), enable_prefix_caching=False)
    scheduler.add(make_request("a", 3 * TOKENS_PER_CHUNK - 1))
    scheduler.add(make_request("b", 3 * TOKENS_PER_CHUNK - 1))
    assert set(shape(run_step(scheduler))) == {"a"}
    assert [request.request_id for request in scheduler.waiting] == ["b"]


def test_the_latest_request_of_the_lowest_priority_is_preempted() -> None:
    scheduler = make_scheduler(make_manager(num_chunks=3), enable_prefix_caching=False)
    for name, priority in [("a", 0), ("low", 9), ("c", 0)]:
        scheduler.add(make_request(name, TOKENS_PER_CHUNK - 2, max_tokens=20, priority=priority))
    run_step(scheduler)
    run_step(scheduler)
    run_step(scheduler)
    batch = run_step(scheduler)
    assert [request.request_id for request in batch.preempted] == ["low", "c"]
    assert set(shape(batch)) == {"a"}


def test_a_preempted_request_keeps_its_tokens_and_computes_them_again() -> None:
    scheduler = make_scheduler(make_manager(num_chunks=3), enable_prefix_caching=False)
    requests = [make_request(name, TOKENS_PER_CHUNK - 2, max_tokens=20) for name in "ab"]
    for request in requests:
        scheduler.add(request)
    while scheduler.has_unfinished_requests():
        run_step(scheduler)
    assert requests[1].metrics.num_preemptions == 1
    assert [request.num_output_tokens for request in requests] == [20, 20]
    assert requests[1].metrics.num_computed_tokens > 33


def test_a_second_request_finds_the_recorded_prompt() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 40, first_token=0))
    run_step(scheduler)
    again = make_request("b", 50, first_token=0)
    scheduler.add(again)
    assert shape(run_step(scheduler))["b"] == (40, 50)
    assert again.num_cached_tokens == 40
    assert again.metrics.chunks_aliased > 0


def test_the_next_turn_finds_prompt_and_output() -> None:
    scheduler = make_scheduler()
    first = make_request("a", 20, max_tokens=5)
    scheduler.add(first)
    while scheduler.has_unfinished_requests():
        run_step(scheduler)
    turn = make_request("b", 30, tokens=[*first.token_ids, *range(5)])
    scheduler.add(turn)
    run_step(scheduler)
    assert turn.num_cached_tokens == 24  # the last output token was never computed


def test_requests_wait_for_a_prefix_that_is_being_computed() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 100, first_token=0))
    scheduler.add(make_request("same", 100, tokens=[*range(90), *range(500, 510)]))
    scheduler.add(make_request("other", 20))
    assert shape(run_step(scheduler)) == {"a": (0, 64)}
    assert shape(run_step(scheduler)) == {"a": (64, 100), "other": (0, 20)}
    assert shape(run_step(scheduler))["same"] == (90, 100)


def test_waiting_for_a_prefix_can_be_switched_off() -> None:
    scheduler = make_scheduler(wait_for_shared_prefix=False)
    scheduler.add(make_request("a", 30, first_token=0))
    scheduler.add(make_request("b", 30, first_token=0))
    assert shape(run_step(scheduler)) == {"a": (0, 30), "b": (0, 30)}


def test_other_salts_share_nothing_and_wait_for_nothing() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 30, first_token=0, cache_salt="x"))
    scheduler.add(make_request("b", 30, first_token=0, cache_salt="y"))
    assert shape(run_step(scheduler)) == {"a": (0, 30), "b": (0, 30)}


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_abort_frees_everything_at_any_time(num_steps: int) -> None:
    manager = make_manager()
    before = available_bytes(manager)
    scheduler = make_scheduler(manager, enable_prefix_caching=False)
    requests = [make_request(name, 50) for name in "abc"]
    for request in requests:
        scheduler.add(request)
    for _ in range(num_steps):
        run_step(scheduler)
    scheduler.abort(requests, "abort")
    assert not scheduler.has_unfinished_requests()
    assert available_bytes(manager) == before
    assert {request.finish_reason for request in requests} == {"abort"}


def test_a_lone_request_that_can_not_grow_ends_with_an_error_and_the_numbers() -> None:
    scheduler = make_scheduler(make_manager(num_chunks=2), enable_prefix_caching=False)
    request = make_request("a", 2 * TOKENS_PER_CHUNK - 1, max_tokens=20)
    scheduler.add(request)
    failed = []
    while scheduler.has_unfinished_requests():
        failed += run_step(scheduler).failed
    assert failed == [request]
    assert request.finish_reason == "error"
    assert f"budget of {2 * CHUNK_BYTES}" in str(request.stop_reason)


def test_a_swapped_request_that_comes_back_alone_and_can_not_grow_ends_in_that_step() -> None:
    """Pinned prefixes leave room for what it had, and not for its next token."""
    manager = make_manager(num_chunks=4, swap_space=4 * CHUNK_BYTES)
    scheduler = make_scheduler(manager, has_swap_space=True, preemption_mode="swap")
    scheduler.add(make_request("pinned", 2 * TOKENS_PER_CHUNK, max_tokens=1, first_token=0))
    run_step(scheduler)
    manager.pin_prefix(list(range(2 * TOKENS_PER_CHUNK)), "owner")
    request = make_request("a", TOKENS_PER_CHUNK, max_tokens=40)
    scheduler.add(request)
    for _ in range(TOKENS_PER_CHUNK + 1):
        run_step(scheduler)
    assert request.num_computed_tokens == 2 * TOKENS_PER_CHUNK  # both of its chunks are full
    scheduler.preempt(request, "test")
    assert request in scheduler.swapped
    batch = run_step(scheduler)
    assert batch.failed == [request]
    assert request.finish_reason == "error"
    assert not scheduler.has_unfinished_requests()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_batched_tokens": 4}, "must be at least"),
        ({"enable_chunked_prefill": False, "max_model_len": 4096}, "without chunked prefill"),
        ({"admission_reserve": 1.0}, "admission_reserve"),
        ({"max_num_seqs": 0}, "max_num_seqs must be a positive integer, got 0"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(**{"max_model_len": 512, "max_num_seqs": 8, **settings})


@pytest.mark.parametrize("seed", range(6))
def test_random_events_lose_no_request_and_no_memory(seed: int) -> None:
    rng = random.Random(seed)
    caching = seed % 2 == 0
    manager = make_manager(num_chunks=24)
    before = available_bytes(manager)
    scheduler = make_scheduler(
        manager,
        enable_prefix_caching=caching,
        max_num_batched_tokens=rng.choice([8, 20, 64]),
        admission_reserve=rng.choice([0.0, 0.1]),
    )
    requests: list[Request] = []
    for event in range(400):
        if rng.random() < 0.3:
            num_prompt = rng.randint(1, 120)
            shared = rng.choice([0, 0, rng.randint(0, num_prompt)])
            tokens = [
                *range(shared),
                *(rng.randint(1000, 9999) for _ in range(num_prompt - shared)),
            ]
            options = {"tokens": tokens, "priority": rng.randint(0, 2)}
            requests.append(make_request(f"r{event}", num_prompt, rng.randint(1, 40), **options))
            scheduler.add(requests[-1])
        if rng.random() < 0.05 and requests:
            victim = rng.choice(requests)
            if not victim.is_finished:
                scheduler.abort([victim], "abort")
        batch = run_step(scheduler)
        assert batch.num_tokens <= scheduler.config.max_num_batched_tokens
        assert batch.items or not scheduler.has_unfinished_requests() or batch.preempted
    for _ in range(20000):
        if not scheduler.has_unfinished_requests():
            break
        run_step(scheduler)
    assert {r.finish_reason for r in requests} <= {"length", "abort"}
    done = [r for r in requests if r.finish_reason == "length"]
    assert all(r.num_output_tokens == r.params.max_tokens for r in done)
    manager.reset_prefix_cache()
    manager.check_integrity()
    assert available_bytes(manager) == before
