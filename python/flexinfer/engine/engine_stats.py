"""EngineStats of an engine at this moment."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flexinfer.metrics.requests import RequestStats
from flexinfer.metrics.speculation import SpeculationStats
from flexinfer.metrics.steps import EngineStats, StepMeter
from flexinfer.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from flexinfer.vtensor import Stats


def take_stats(
    scheduler: Scheduler,
    meter: StepMeter,
    requests: RequestStats,
    speculation: SpeculationStats | None,
    draft_memory: Stats | None,
) -> EngineStats:
    """Walks all chunks."""
    manager = scheduler.manager
    memory = manager.stats()
    return EngineStats(
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        num_swapped=len(scheduler.swapped),
        is_sleeping=manager.asleep,
        preemptions=scheduler.preemption.counts_by_mode(),
        num_prefix_waits=scheduler.num_prefix_waits,
        num_promoted=scheduler.waiting.num_promoted,
        extension_depth_tokens=scheduler.pre_extender.depth.tokens,
        steps=replace(meter.totals),
        last_step=meter.last,
        memory=memory,
        draft_memory=draft_memory,
        requests=requests,
        step_tokens=meter.tokens.copy(),
        num_deferred=scheduler.num_deferred,
        capacity_tokens=memory.budget_bytes // manager.spec.bytes_per_token,
        kv_groups=manager.spec.retentions(),
        kv_state_bytes=manager.spec.state_bytes(manager.chunk_bytes),
        speculation=speculation,
    )
