"""SimulatedReplica: a real scheduler and manager without memory; steps take virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flexinfer.scheduler.batch import Batch
from flexinfer.scheduler.request import Request
from flexinfer.scheduler.scheduler import Scheduler
from flexinfer.scheduler_config import SchedulerConfig
from flexinfer.simulation.step_cost import StepCost, StepWork
from flexinfer.vtensor import KVSpec, SimConfig, VTensorManager

OUTPUT_TOKEN = 1
"""What the model that is not there says, always."""


@dataclass(frozen=True)
class ReplicaShape:
    """What all replicas of a fleet are."""

    spec: KVSpec
    kv_cache_bytes: int
    chunk_bytes: int
    scheduler: SchedulerConfig
    cost: StepCost


class SimulatedReplica:
    def __init__(self, shape: ReplicaShape) -> None:
        self._cost = shape.cost
        self.manager = VTensorManager(
            shape.spec,
            "sim",
            max_requests=shape.scheduler.max_num_seqs,
            memory_budget=shape.kv_cache_bytes,
            chunk_bytes=shape.chunk_bytes,
            sim=SimConfig(granularity=4096),
        )
        self.scheduler = Scheduler(shape.scheduler, self.manager)
        self.busy_s = 0.0
        self.num_steps = 0
        self._batch: Batch | None = None

    @property
    def is_computing(self) -> bool:
        return self._batch is not None

    def begin_step(self) -> float | None:
        """Seconds that the step takes which begins now; None: there is nothing to compute."""
        batch = Batch()
        while self.scheduler.has_unfinished_requests() and not batch.items:
            batch = self.scheduler.schedule()
            if not batch.items and not batch.failed:
                raise RuntimeError("the scheduler has requests and computes none of them")
        if not batch.items:
            return None
        self._batch = batch
        seconds = self._cost.seconds(StepWork.of(batch.items))
        self.busy_s += seconds
        self.num_steps += 1
        return seconds

    def end_step(self, on_first_token: Callable[[Request], None]) -> None:
        batch = self._batch
        assert batch is not None
        self._batch = None
        self.scheduler.advance(batch)
        for item in batch.items:
            request = item.request
            if not item.samples:
                continue
            if request.num_output_tokens == 0:
                on_first_token(request)
            request.append(OUTPUT_TOKEN)
            if request.is_finished:
                self.scheduler.finish(request)

    def close(self) -> None:
        self.scheduler.abort(list(self.scheduler.requests), "abort")
        self.manager.close()
