"""Scheduler: which requests compute which tokens in the next step, and with what memory.

Continuous batching (Orca, Yu et al., OSDI 2022) with chunked prefill (Sarathi-Serve, Agrawal et
al., OSDI 2024) over vTensors (FlexInfer, Xu et al., 2024, Algorithm 1). No torch. Not thread-safe.

A request moves between three places, and leaves from any of them:

    waiting --admit--> running --swap out--> swapped
       ^                  |   ^                 |
       +----recompute-----+   +-----swap in-----+

Invariants:
1. A request is in one of `waiting`, `running`, `swapped`, or in none: ended or suspended.
2. Memory for the whole prefill is spoken for at admission: what running prefills have yet to get is
   subtracted from what is available, so that admission never overcommits the budget.
3. After `schedule()` all scheduled tokens are backed by chunks.
4. `num_seqs` <= max_num_seqs: the forks that a running prompt is to have are counted with it.
5. Nothing is admitted while a request is swapped out.
6. What a request holds that ends while a step of it is in flight is freed when that has landed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import chain
from typing import TYPE_CHECKING

from flexinfer.errors import OutOfMemoryError
from flexinfer.metrics.steps import StepStats
from flexinfer.scheduler.adapter_turns import AdapterTurns
from flexinfer.scheduler.admission import Admission, release_all
from flexinfer.scheduler.batch import Batch, ScheduledRequest, next_tokens, plan_running
from flexinfer.scheduler.in_flight import StepsInFlight
from flexinfer.scheduler.pins import Pins
from flexinfer.scheduler.pre_extension import PreExtender
from flexinfer.scheduler.preemption import Cause, Decision, PreemptionPolicy
from flexinfer.scheduler.queue import WaitingQueue
from flexinfer.scheduler.request import Request
from flexinfer.scheduler.states import States
from flexinfer.scheduler.swapped import SwappedRequests
from flexinfer.scheduler_config import SchedulerConfig
from flexinfer.types import FinishReason

if TYPE_CHECKING:
    from flexinfer.vtensor import VTensor, VTensorManager

__all__ = ["Batch", "ScheduledRequest", "Scheduler"]

logger = logging.getLogger(__name__)


class Scheduler:
    """Owns the waiting queue and the running set; asks the manager for memory."""

    def __init__(self, config: SchedulerConfig, manager: VTensorManager) -> None:
        self.config = config
        self.manager = manager
        self.waiting = WaitingQueue(config.scheduling_policy, config.max_passed_over)
        self.running: dict[str, Request] = {}
        self.preemption = PreemptionPolicy(config.preemption_mode, config.has_swap_space)
        self.states = States(config, manager)
        self.admission = Admission(config, manager, self.states)
        self.swapped = SwappedRequests(self.waiting.key, self.preemption, self.admission)
        self.pre_extender = PreExtender(manager, config.max_num_batched_tokens)
        self.pins = Pins(manager, self.states.snapshots, to_export=config.to_export)
        self.num_prefix_waits = 0
        self.num_deferred = 0
        """Requests that the last step put off until another has computed their prefix."""
        self._ended: list[Request] = []
        self._in_flight = StepsInFlight()
        self._orphans: list[VTensor] = []  # of requests that ended while the pool slept

    @property
    def num_seqs(self) -> int:
        """Slots spoken for: requests that have one, and the forks that they will have."""
        holders = chain(self.running.values(), self.swapped)
        return sum(1 + request.num_forks for request in holders)

    @property
    def requests(self) -> Iterator[Request]:
        """All that have not ended."""
        return chain(self.running.values(), self.swapped, self.waiting)

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting or self.running or self.swapped)

    def add(self, request: Request) -> None:
        """Queue a request, at the place that the policy gives it."""
        request.stop_every = self.states.interval
        self.waiting.add(request)

    def schedule(self) -> Batch:
        """The next step: running requests first (decodes before prefills), then swapped ones, then
        new ones. Raises ValueError while the manager is asleep."""
        if self.manager.asleep:
            raise ValueError("the engine is asleep; call wake_up() first")
        self.release_ended()
        batch = Batch()
        self._schedule_running(batch)
        if not batch.preempted and not batch.failed:
            self._schedule_swapped(batch)
            if not self.swapped:
                self._schedule_waiting(batch)
        return batch

    def schedule_ahead(self) -> Batch:
        """The step after one whose tokens are not known yet. Nobody is preempted, swapped or ended
        for it; empty where it has to wait."""
        batch = Batch()
        items = plan_running(self.running.values(), self.config.max_num_batched_tokens)
        if not self.swapped and self._extend(items):
            batch.items = items
            self._schedule_waiting(batch)
        return batch

    def release_ended(self) -> None:
        """Free what requests held that were aborted while the manager slept."""
        while self._orphans:
            self._orphans.pop().release()

    def pre_extend(self, batch: Batch) -> None:
        """Have the memory of the next steps mapped in the background (paper: Algorithm 1)."""
        self.pre_extender.ask(batch.items if self.config.enable_pre_extend else ())

    def observe(self, step: StepStats) -> None:
        """Learn from a step's times: how far to map ahead, how fast a prefill is."""
        self.pre_extender.depth.observe_step(
            step.step_us, step.map_us_hidden, step.rows_pre_extended
        )
        if 2 * step.num_prefill_tokens > step.num_tokens:
            self.preemption.observe_prefill(step.num_tokens, step.step_us / 1e6)

    def launch(self, batch: Batch) -> None:
        """The step is in flight until `advance` or `drop`; the one after it may be scheduled."""
        self._in_flight.launch(batch)

    def advance(self, batch: Batch) -> None:
        """The step is computed: its tokens have KV. Records prompts whose prefill is complete."""
        prefilling = [item for item in batch.items if item.request.is_prefilling]
        self._in_flight.land(batch)
        self.states.land(batch.items)
        self.pre_extender.forget(batch.items)
        for item in prefilling:
            if not item.request.is_prefilling and not item.request.is_finished:
                self._record(item.request)
        self._free_landed()

    def drop(self, batch: Batch) -> None:
        """The step has failed: see `StepsInFlight.drop`."""
        self._in_flight.drop(batch)
        self._free_landed()

    def finish(self, request: Request) -> None:
        """The request has ended well: record its tokens for the next turn, free its memory."""
        if self._in_flight.keeps(request):
            return
        self._ended.append(request)
        self._leave(request)
        try:
            self._record(request)
        finally:
            self._release(request)

    def abort(
        self, requests: Iterable[Request], reason: FinishReason, message: str | None = None
    ) -> None:
        """End requests at any point, waiting or running; all they hold is freed, unrecorded."""
        for request in requests:
            request.finish(reason, message)
            if self._in_flight.keeps(request):
                continue
            self._ended.append(request)
            self._leave(request)
            self._release(request)

    def take_ended(self) -> list[Request]:
        """The requests that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def fork(self, parent: Request, child: Request) -> None:
        """Run `child` beside `parent`: it shares all that is computed of it, and copies the tail
        row when it writes there (PagedAttention, section 4.4: fork, append, free).

        The child, a clone of the parent with or without a token more, is queued instead where no
        slot is left or the parent has no KV any more; it then starts at the recorded prefix.
        """
        child.arrival_idx = parent.arrival_idx
        vtensor = self._try_fork(parent, child)
        if vtensor is None:
            self.waiting.put_back(child)
            return
        child.start_forked(parent, vtensor)
        parent.is_forked = child.is_forked = True
        child.metrics.chunks_aliased += vtensor.info().chunks_aliased
        self.running[child.request_id] = child

    def suspend(self, request: Request) -> None:
        """Take a running request out of the way until `resume`. It holds no memory meanwhile; what
        it has computed is recorded, and pressure evicts of it only what is needed."""
        was_swapped = request in self.swapped
        self._leave(request)
        if not was_swapped:
            self._record(request)
        self._release(request)
        request.requeue()

    def resume(self, request: Request) -> None:
        """The request goes on; nothing happens if it was not suspended."""
        if request.request_id in self.running or request in self.swapped:
            return
        if request not in self.waiting:
            self.waiting.put_back(request)

    def _try_fork(self, parent: Request, child: Request) -> VTensor | None:
        is_running = parent.request_id in self.running and self.num_seqs < self.config.max_num_seqs
        if not is_running or parent.vtensor is None:
            return None
        try:
            self.states.fork(parent, child)
            return parent.vtensor.fork()
        except OutOfMemoryError:
            release_all(child.take_vtensors())
            return None

    # Running requests.

    def _schedule_running(self, batch: Batch) -> None:
        """Give each running request its next tokens, preempting the last ones while short."""
        while self.running:
            items = plan_running(self.running.values(), self.config.max_num_batched_tokens)
            if self._extend(items):
                batch.items = items
                return
            victim = self.choose_victim()
            if self.preemption.is_on and len(self.running) > 1:
                self.preempt(victim, "growth")
                batch.preempted.append(victim)
            elif not self.pins.release_oldest():
                self._fail(victim, batch)

    def _extend(self, items: list[ScheduledRequest]) -> bool:
        """Back the items that grow beyond their memory: all or none, in one call."""
        growing = [item for item in items if item.end > item.request.num_extended_tokens]
        vtensors, ends = [item.vtensor for item in growing], [item.end for item in growing]
        if self.states.are_kept:
            backed = self.states.try_extend((item.request for item in items), vtensors, ends)
        else:
            backed = not growing or self.manager.try_extend(vtensors, ends)
        for item in growing if backed else ():
            item.request.num_extended_tokens = item.end
        return backed

    # Preemption (PagedAttention, section 4.5).

    def choose_victim(self, among: Iterable[Request] | None = None) -> Request:
        """The running request, of these or of all, that has the lowest priority and came last.
        REQUIRES: one runs."""
        return max(self.running.values() if among is None else among, key=self.waiting.key)

    def preempt(self, request: Request, cause: Cause) -> None:
        """Take the memory of a running request; it goes on later where it was."""
        decision = self.swapped.choose(request)
        if decision.mode == "swap" and not self.swapped.try_move_out(request):
            decision = Decision("recompute", "swap space is full")
        self._give_way(request, decision, cause)

    def _give_way(self, request: Request, decision: Decision, cause: Cause) -> None:
        if decision.mode == "recompute":
            self.suspend(request)
            self.waiting.put_back(request)
        else:
            del self.running[request.request_id]
        request.metrics.num_preemptions += 1
        self.preemption.count(decision, cause)
        logger.debug("preempted %r: %s (%s)", request.request_id, decision, cause)

    def _schedule_swapped(self, batch: Batch) -> None:
        """Bring swapped requests back, in order, until tokens or memory run out."""
        num_left = self.config.max_num_batched_tokens - batch.num_tokens
        for request in list(self.swapped):
            if num_left == 0:
                return
            if not self._releasing_pins(partial(self._swap_in, request)):
                if self.running:
                    return
                self._fail(request, batch)
                continue
            item = next_tokens(request, num_left)
            if self._releasing_pins(partial(self._extend, [item]), num_own=1):
                batch.items.append(item)
                num_left -= item.num_tokens
            elif len(self.running) == 1:
                self._fail(request, batch)  # else the next step chooses a victim

    def _swap_in(self, request: Request) -> bool:
        """Swapped -> running. False: shortage, nothing changed."""
        if not self.swapped.try_move_in(request, self.running.values()):
            return False
        self.running[request.request_id] = request
        return True

    # Waiting requests.

    def _schedule_waiting(self, batch: Batch) -> None:
        """Admit in the order of the queue until tokens, slots or memory run out."""
        num_left = self.config.max_num_batched_tokens - batch.num_tokens
        num_slots = self.config.max_num_seqs - self.num_seqs
        self.num_deferred = 0
        if num_left == 0 or num_slots <= 0 or not self.waiting:
            return
        self.waiting.promote()
        match = cache(self.admission.match)
        turns = AdapterTurns(self.config.max_loras, self.running.values())
        for request in self.waiting.candidates(num_slots, match):
            if num_left == 0 or num_slots <= request.num_forks:
                return
            if turns.waits(request):
                continue
            num_matched = match(request)
            if self.admission.waits_for_prefix(request, num_matched, self.running.values()):
                self.num_prefix_waits += 1
                self.num_deferred += 1
                continue
            num_slots -= 1 + request.num_forks
            whole_prompt = request.num_tokens - num_matched
            if not self.config.enable_chunked_prefill and whole_prompt > num_left:
                return
            admit = partial(self._admit, request, num_matched, num_left)
            if not self._releasing_pins(admit):
                if self.running:
                    return
                self._fail(request, batch)
                continue
            turns.start(request)
            batch.items.append(next_tokens(request, num_left))
            num_left -= batch.items[-1].num_tokens
            if self.waiting.promote():
                return  # the order has changed

    def _admit(self, request: Request, num_matched: int, num_left: int) -> bool:
        """Waiting -> running. False: shortage, nothing changed."""
        vtensor = self.admission.try_create(request, num_matched, num_left, self.running.values())
        if vtensor is None:
            return False
        self.waiting.admit(request)
        self.running[request.request_id] = request
        return True

    def _releasing_pins(self, attempt: Callable[[], bool], num_own: int = 0) -> bool:
        """`attempt`; while it fails and no other request runs that will free memory, again with one
        pin less. num_own: how many of the running requests the attempt is for."""
        while not attempt():
            if len(self.running) > num_own or not self.pins.release_oldest():
                return False
        return True

    # Leaving.

    def _free_landed(self) -> None:
        """Requests leave that ended while they were in flight."""
        for request in self._in_flight.take_landed():
            if request.finish_reason in ("stop", "length"):
                self.finish(request)
            else:
                self.abort([request], request.finish_reason or "abort", request.stop_message)

    def _leave(self, request: Request) -> None:
        """Out of all sets; what it holds is still to be released."""
        if self.running.pop(request.request_id, None) is None:
            self.waiting.discard(request)
            self.swapped.discard(request)
        if request.vtensor is not None and not self.manager.asleep:
            request.metrics.chunks_copied += request.vtensor.info().chunks_copied

    def _release(self, request: Request) -> None:
        """All that it holds, now, or, of a sleeping pool, at the next step."""
        self._orphans += request.take_vtensors()
        if not self.manager.asleep:
            self.release_ended()

    def _record(self, request: Request) -> None:
        num_tokens = request.num_computed_tokens
        if self.config.enable_prefix_caching and request.vtensor is not None and num_tokens > 0:
            request.vtensor.record_prefix(request.token_array[:num_tokens])
            self.states.record(request)
            self.pins.keep_to_export(request)

    def _fail(self, request: Request, batch: Batch) -> None:
        """It does not fit, and no other request may be preempted: waiting longer cannot help it,
        unless, computed anew, it has no row to copy."""
        if self.preemption.is_on and request.is_forked:
            self._give_way(request, Decision("recompute", "row of a fork"), "growth")
            batch.preempted.append(request)
            return
        num_others = 0 if self.preemption.is_on else len(self.running) - 1
        self.abort([request], "error", self.admission.explain_shortage(request, num_others))
        batch.failed.append(request)
