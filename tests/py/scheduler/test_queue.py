"""The order of admission, and the bound on how often a request may be passed over."""

from __future__ import annotations

import pytest

pytest.importorskip("sortedcontainers")

from flexinfer.scheduler.queue import WINDOW, WaitingQueue
from flexinfer.scheduler.request import Request
from scheduler.test_scheduler import make_manager, make_request, make_scheduler, run_step


def filled(policy: str, requests: list[Request], max_passed_over: int = 3) -> WaitingQueue:
    queue = WaitingQueue(policy, max_passed_over)
    for request in requests:
        queue.add(request)
    return queue


def names(requests: list[Request]) -> str:
    return "".join(request.request_id for request in requests)


@pytest.mark.parametrize(
    ("policy", "order"), [("fcfs", "abcd"), ("priority", "cabd"), ("prefix", "cdab")]
)
def test_each_policy_has_its_order(policy: str, order: str) -> None:
    requests = [
        make_request(n, 4, priority=p) for n, p in [("a", 0), ("b", 0), ("c", -1), ("d", 0)]
    ]
    queue = filled(policy, requests)
    cached = {"d": 40}
    assert names(queue.candidates(8, lambda r: cached.get(r.request_id, 0))) == order


@pytest.mark.parametrize("policy", ["fcfs", "priority", "prefix"])
def test_no_more_than_the_bound_pass_a_request_over(policy: str) -> None:
    """An endless stream of requests that the policy likes better."""
    queue = filled(policy, [make_request("x", 4), make_request("victim", 4, priority=9)])
    for admitted in range(100):
        queue.add(make_request(f"n{admitted}", 4, priority=-1))
        queue.promote()
        chosen = queue.candidates(1, lambda r: 0 if r.request_id == "victim" else 50)[0]
        queue.admit(chosen)
        if chosen.request_id == "victim":
            break
    assert admitted <= 1 + queue.max_passed_over  # "x" stood before it


def test_a_due_request_keeps_its_rank_when_it_is_preempted() -> None:
    low = make_request("low", 4, priority=9)
    queue = filled("priority", [low], max_passed_over=1)
    queue.num_admitted = 1
    assert queue.promote()
    queue.admit(low)
    queue.add(make_request("high", 4, priority=-5))
    queue.put_back(low)
    assert names(queue.candidates(2, lambda r: 0)) == "lowhigh"


def test_a_step_looks_at_a_bounded_number_of_requests() -> None:
    queue = filled("prefix", [make_request(f"r{i}", 2) for i in range(500)])
    asked = []
    queue.candidates(4, lambda r: asked.append(r) or 0)  # type: ignore[func-returns-value]
    assert len(asked) == 4 + WINDOW


def test_leaving_requests_are_forgotten_in_any_state() -> None:
    requests = [make_request(n, 2) for n in "abc"]
    queue = filled("prefix", requests, max_passed_over=1)
    queue.num_admitted = 2
    queue.promote()
    for request in requests:
        queue.discard(request)
        queue.discard(request)
    assert len(queue) == 0
    assert not queue.promote()


def test_prefix_policy_admits_what_is_cached_first() -> None:
    scheduler = make_scheduler(scheduling_policy="prefix", max_num_seqs=1)
    scheduler.add(make_request("seed", 40, max_tokens=1, first_token=0))
    run_step(scheduler)
    scheduler.add(make_request("cold", 40, max_tokens=1))
    scheduler.add(make_request("warm", 40, max_tokens=1, first_token=0))
    assert [i.request.request_id for i in run_step(scheduler).items] == ["warm"]
    assert [i.request.request_id for i in run_step(scheduler).items] == ["cold"]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "prefix"])
def test_nobody_starves_under_a_stream_of_better_requests(policy: str) -> None:
    """Cached, high priority requests arrive faster than they are served."""
    scheduler = make_scheduler(
        make_manager(num_chunks=30, max_requests=2),
        scheduling_policy=policy,
        max_num_seqs=2,
        max_passed_over=5,
    )
    scheduler.add(make_request("seed", 40, max_tokens=1, first_token=0))
    run_step(scheduler)
    victim = make_request("victim", 40, max_tokens=5, priority=0 if policy == "prefix" else 7)
    scheduler.add(victim)
    for idx in range(60):
        for twin in range(2):
            scheduler.add(make_request(f"{idx}-{twin}", 40, max_tokens=2, first_token=0))
        run_step(scheduler)
        if victim.is_finished:
            break
    assert victim.finish_reason == "length"


def test_waiting_for_a_shared_prefix_can_not_starve() -> None:
    """Prefills of ever more of the same prompt run before it; it waits for a few, then goes."""
    scheduler = make_scheduler(max_num_batched_tokens=20, max_passed_over=4)
    scheduler.add(make_request("seed", 20, max_tokens=1, first_token=0))
    run_step(scheduler)
    victim = make_request("victim", 400, max_tokens=1, first_token=0)
    scheduler.add(victim)
    for idx in range(20):
        if victim.request_id in scheduler.running:
            break
        better = make_request(f"{idx}", 20 + 16 * (idx + 1), 1, first_token=0, priority=-1)
        scheduler.add(better)
        run_step(scheduler)
    assert scheduler.num_prefix_waits >= 2
    assert idx <= 6


def test_only_the_first_admission_of_a_request_counts() -> None:
    """One that is preempted and comes back passes nobody over."""
    request = make_request("a", 4)
    queue = filled("fcfs", [request])
    queue.admit(request)
    request.metrics.num_preemptions = 1
    queue.put_back(request)
    queue.admit(request)
    assert queue.num_admitted == 1
