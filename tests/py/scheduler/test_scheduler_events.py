"""Scheduler and manager together, on the sim driver, through random events. No model, no torch.

Arrivals with shared prefixes, steps, aborts, forks, priorities, budget changes, preemption of both
kinds, sleep and wake, pins. At the end no request has starved, none is lost, every chunk is
accounted for.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("sortedcontainers")

from flexinfer import OutOfMemoryError, SamplingParams
from flexinfer.memory.elastic import ElasticMemory
from flexinfer.outputs import RequestMetrics
from flexinfer.scheduler.batch import Batch
from flexinfer.scheduler.request import Request
from flexinfer.scheduler.scheduler import Scheduler
from flexinfer.scheduler_config import SchedulerConfig
from flexinfer.vtensor import KVSpec, VTensorManager

CHUNK_BYTES = 64 << 10
MAX_TOKENS = 96
MAX_CHUNKS = 40
MIN_CHUNKS = 12
"""Holds the longest request, and the pins besides."""


@dataclass(frozen=True)
class Setup:
    """One world for the events."""

    seed: int
    policy: str = "priority"
    preemption_mode: str = "auto"
    swap_chunks: int = 40
    planes_per_layer: bool = False
    park: bool = True
    ready_chunks: int = 2
    max_free_chunks: int | None = 20
    idle_chunks: int | None = None

    def make_manager(self) -> VTensorManager:
        """A row of chunks holds 16 tokens."""
        spec = KVSpec(
            num_layers=2,
            num_kv_heads=4,
            head_dim=64,
            max_seq_len=128,
            layers_per_plane=1 if self.planes_per_layer else None,
        )
        return VTensorManager(
            spec,
            device="sim",
            max_requests=8,
            memory_budget=MAX_CHUNKS * CHUNK_BYTES,
            chunk_bytes=CHUNK_BYTES // spec.num_planes,
            park=self.park,
            min_free_bytes=self.ready_chunks * CHUNK_BYTES,
            max_free_bytes=None
            if self.max_free_chunks is None
            else self.max_free_chunks * CHUNK_BYTES,
            prefix_cache_bytes=None if self.idle_chunks is None else self.idle_chunks * CHUNK_BYTES,
            swap_space=self.swap_chunks * CHUNK_BYTES,
        )


class World:
    """The scheduler under test, a model that answers at random, and what must hold of both."""

    def __init__(self, setup: Setup) -> None:
        self.rng = random.Random(setup.seed)
        self.manager = setup.make_manager()
        config = SchedulerConfig(
            max_model_len=128,
            max_num_seqs=8,
            max_num_batched_tokens=self.rng.choice([8, 24, 64]),
            scheduling_policy=setup.policy,
            preemption_mode=setup.preemption_mode,
            has_swap_space=setup.swap_chunks > 0,
            admission_reserve=self.rng.choice([0.0, 0.05]),
            max_passed_over=8,
            max_loras=2,
        )
        self.scheduler = Scheduler(config, self.manager)
        self.elastic = ElasticMemory(self.scheduler, self.manager)
        self.requests: list[Request] = []
        self.live: dict[str, Request] = {}
        self.pinned: list[str] = []
        self.num_events = 0
        self.num_ended = 0

    # Events.

    def arrive(self) -> None:
        if len(self.live) >= 24:
            return
        rng = self.rng
        num_prompt = rng.randint(1, MAX_TOKENS - 24)
        shared = rng.choice([0, rng.randint(0, num_prompt)])
        family = rng.randint(0, 2) * 1000
        fresh = [rng.randint(10_000, 99_999) for _ in range(num_prompt - shared)]
        max_tokens = rng.randint(1, 24)
        request = Request(
            request_id=f"r{self.num_events}",
            prompt_token_ids=[*range(family, family + shared), *fresh],
            params=SamplingParams(max_tokens=max_tokens),
            max_num_tokens=num_prompt + max_tokens,
            metrics=RequestMetrics(arrival_time=0.0),
            priority=rng.choice([0, 0, 0, 1, 5]),
            cache_salt=rng.choice(["", "", "tenant"]),
            adapter=rng.choice([0, 0, 1, 2, 3]),
        )
        self.live[request.request_id] = request
        self.scheduler.add(request)

    def step(self) -> None:
        if self.manager.asleep:
            with pytest.raises(ValueError, match="asleep"):
                self.scheduler.schedule()
            return
        batch = self.scheduler.schedule()
        self.check_batch(batch)
        self.scheduler.pre_extend(batch)
        self.scheduler.advance(batch)
        for item in batch.items:
            if item.samples:
                item.request.append(self.rng.randint(0, 9))
                if item.request.is_finished:
                    self.scheduler.finish(item.request)
        self.forget([*batch.failed, *(i.request for i in batch.items if i.request.is_finished)])

    def abort(self) -> None:
        if self.live:
            victim = self.rng.choice(list(self.live.values()))
            self.scheduler.abort([victim], "abort")
            self.forget([victim])

    def fork(self) -> None:
        """A branch of a running request: shares all chunks, copies the tail when it writes."""
        parents = [r for r in self.scheduler.running.values() if not r.is_prefilling]
        if parents and not self.manager.asleep and len(self.live) < 24:
            parent = self.rng.choice(parents)
            child = parent.clone(f"f{self.num_events}", self.num_events, parent.params)
            self.live[child.request_id] = child
            self.scheduler.fork(parent, child)

    def preempt(self) -> None:
        scheduler = self.scheduler
        if scheduler.running and scheduler.preemption.is_on and not self.manager.asleep:
            scheduler.preempt(self.rng.choice(list(scheduler.running.values())), "test")

    def change_budget(self) -> None:
        if self.manager.asleep:
            return
        budget = self.rng.randint(MIN_CHUNKS, MAX_CHUNKS) * CHUNK_BYTES
        before = len(self.scheduler.running)
        try:
            self.elastic.set_budget(budget)
            assert self.manager.stats().resident_bytes <= budget
        except OutOfMemoryError as error:
            if not self.scheduler.preemption.is_on and len(self.scheduler.running) != before:
                raise AssertionError("a refused budget took running requests away") from error

    def sleep_or_wake(self) -> None:
        if self.manager.asleep:
            self.elastic.wake_up()
        else:
            self.elastic.sleep(self.rng.choice([1, 1, 2]))
            assert self.manager.stats().resident_bytes == 0

    def pin_or_unpin(self) -> None:
        if self.manager.asleep:
            return
        if len(self.pinned) >= 2:
            self.manager.unpin_prefix(self.pinned.pop(0))
            return
        owner = f"o{self.num_events}"
        family = self.rng.randint(0, 2) * 1000
        tokens = list(range(family, family + 40))
        if self.manager.pin_prefix(tokens, owner, self.rng.choice([None, 0.001, 60.0])):
            self.pinned.append(owner)

    def reset_cache(self) -> None:
        if not self.manager.asleep:
            self.manager.reset_prefix_cache()

    def event(self) -> None:
        events: list[Any] = [
            self.step,
            self.arrive,
            self.abort,
            self.preempt,
            self.fork,
            self.change_budget,
            self.sleep_or_wake,
            self.pin_or_unpin,
            self.reset_cache,
        ]
        if self.manager.asleep and self.rng.random() < 0.5:
            self.sleep_or_wake()
        weights = [700, 200, 15, 15, 15, 8, 4, 6, 2]
        self.rng.choices(events, weights)[0]()
        self.num_events += 1

    # What must hold.

    def check_batch(self, batch: Batch) -> None:
        scheduler = self.scheduler
        assert batch.num_tokens <= scheduler.config.max_num_batched_tokens
        assert scheduler.num_seqs <= scheduler.config.max_num_seqs
        assert len({r.adapter for r in scheduler.running.values()} - {0}) <= 2
        for item in batch.items:
            assert item.end <= item.request.num_extended_tokens
            assert item.start == item.request.num_computed_tokens
        progress = batch.items or batch.preempted or batch.failed
        assert progress or not scheduler.has_unfinished_requests()

    def forget(self, ended: list[Request]) -> None:
        for request in ended:
            self.num_ended += 1
            assert request.vtensor is None
            if request.finish_reason == "length":
                assert request.num_output_tokens == request.params.max_tokens
            elif request.finish_reason == "error":
                assert "bytes of the budget" in str(request.stop_reason)
                assert self.pinned or not self.scheduler.preemption.is_on
            else:
                assert request.finish_reason == "abort"
            del self.live[request.request_id]

    def check(self) -> None:
        self.manager.check_integrity()
        waiting = {r.request_id for r in self.scheduler.waiting}
        swapped = {r.request_id for r in self.scheduler.swapped}
        running = set(self.scheduler.running)
        assert waiting | swapped | running == set(self.live)
        assert len(waiting) + len(swapped) + len(running) == len(self.live)

    def finish(self) -> None:
        """All that is left ends, within a bound; then nothing is held."""
        if self.manager.asleep:
            self.elastic.wake_up()
        for owner in self.pinned:
            self.manager.unpin_prefix(owner)
        self.pinned.clear()
        for _ in range(200 * (len(self.live) + 1)):
            if not self.live:
                break
            self.step()
        assert not self.live, "requests starve"
        self.step()  # releases what ended while the pool slept
        assert not self.scheduler.has_unfinished_requests()
        self.check_memory()

    def check_memory(self) -> None:
        manager = self.manager
        manager.drain()
        manager.reset_prefix_cache()
        manager.check_integrity()
        stats = manager.stats()
        assert stats.num_vtensors == 0
        assert stats.mapped_bytes == stats.swapped_bytes == stats.recorded_bytes == 0
        assert stats.available_bytes == stats.budget_bytes
        assert manager.trim() == stats.resident_bytes
        stats = manager.stats()
        assert stats.resident_bytes == stats.free_bytes == stats.parked_bytes == 0
        manager.close()


def run(setup: Setup, num_events: int, check_every: int) -> World:
    world = World(setup)
    for idx in range(num_events):
        world.event()
        if idx % check_every == 0:
            world.check()
    world.finish()
    return world


SHORT = [
    Setup(0),
    Setup(1, policy="fcfs", preemption_mode="recompute", swap_chunks=0),
    Setup(2, policy="prefix", preemption_mode="swap"),
    Setup(3, policy="prefix", preemption_mode="swap", swap_chunks=6, planes_per_layer=True),
    Setup(4, preemption_mode="off", park=False),
    Setup(5, planes_per_layer=True, ready_chunks=0, max_free_chunks=None),
    Setup(6, park=False, max_free_chunks=4),
    Setup(7, max_free_chunks=None, idle_chunks=6),
    Setup(8, policy="prefix", idle_chunks=0),
]


@pytest.mark.parametrize("setup", SHORT, ids=lambda s: f"{s.seed}-{s.policy}-{s.preemption_mode}")
def test_nothing_is_lost_whatever_happens_checked_at_every_event(setup: Setup) -> None:
    world = run(setup, 1500, check_every=1)
    assert world.num_ended > 100


def test_nothing_is_lost_in_a_hundred_thousand_events() -> None:
    num_ended = sum(
        run(Setup(100 + i, policy=policy, preemption_mode=mode), 25_000, check_every=500).num_ended
        for i, (policy, mode) in enumerate(
            [("priority", "auto"), ("fcfs", "swap"), ("prefix", "recompute"), ("prefix", "swap")]
        )
    )
    assert num_ended > 10_000
