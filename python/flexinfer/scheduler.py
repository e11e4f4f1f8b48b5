"""Scheduler: which requests compute which tokens in the next step, and with what memory.

Continuous batching (Orca, Yu et al., OSDI 2022) with chunked prefill (Sarathi-Serve, Agrawal et
al., OSDI 2024) over vTensors (FlexInfer, Xu et al., 2024, Algorithm 1). No torch. Not thread-safe.

Invariants:
1. A request is in `waiting`, or in `running`, or in neither (it has ended), never in both.
2. Each request in `running` has a vTensor that backs its whole prefill: memory is claimed at
   admission, at once or not at all, so that admission never overcommits the budget.
3. After `schedule()` all scheduled tokens are backed by chunks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sortedcontainers import SortedKeyList

from flexinfer.config import SchedulerConfig
from flexinfer.request import Request
from flexinfer.types import FinishReason

if TYPE_CHECKING:
    from flexinfer.vtensor import VTensor, VTensorManager


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """Tokens [start, end) of one request go through the model in this step."""

    request: Request
    vtensor: VTensor
    start: int
    end: int
    samples: bool
    """Whether the last of them gives a new token."""

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(slots=True)
class Batch:
    """One step. `failed` requests have ended because they can not get the memory they need."""

    items: list[ScheduledRequest] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    failed: list[Request] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items)


class Scheduler:
    """Owns the waiting queue and the running set; asks the manager for memory."""

    def __init__(self, config: SchedulerConfig, manager: VTensorManager) -> None:
        self.config = config
        self.manager = manager
        self.waiting: SortedKeyList[Request] = SortedKeyList(key=lambda r: r.sort_key)
        self.running: dict[str, Request] = {}
        self._num_arrived = 0

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request, by priority, then arrival."""
        request.arrival_idx = self._num_arrived
        self._num_arrived += 1
        self.waiting.add(request)

    def schedule(self) -> Batch:
        """The next step: running requests first (decodes before prefills), then new ones."""
        batch = Batch()
        self._schedule_running(batch)
        if not batch.preempted and not batch.failed:
            self._schedule_waiting(batch)
        return batch

    def pre_extend(self, batch: Batch) -> None:
        """Have the memory of the step after this one mapped in the background."""
        growing = [
            item
            for item in batch.items
            if item.samples and item.end + 1 < item.request.max_num_tokens
        ]
        if growing:
            self.manager.pre_extend(
                [item.vtensor for item in growing], [item.end + 1 for item in growing]
            )

    def advance(self, batch: Batch) -> None:
        """The step is computed: its tokens have KV. Records prompts whose prefill is complete."""
        for item in batch.items:
            request = item.request
            was_prefilling = request.is_prefilling
            request.num_computed_tokens = item.end
            request.metrics.num_computed_tokens += item.num_tokens
            if was_prefilling and not request.is_prefilling:
                self._record(request, item.vtensor)

    def finish(self, request: Request) -> None:
        """The request has ended well: record its tokens for the next turn, free its memory."""
        vtensor = self._leave(request)
        if vtensor is not None:
            try:
                self._record(request, vtensor)
            finally:
                vtensor.release()

    def abort(
        self, requests: Iterable[Request], reason: FinishReason, message: str | None = None
    ) -> None:
        """End requests at any point, waiting or running; all they hold is freed, unrecorded."""
        for request in requests:
            vtensor = self._leave(request)
            request.finish(reason, message)
            if vtensor is not None:
                vtensor.release()

    # Running requests.

    def _schedule_running(self, batch: Batch) -> None:
        """Give each running request its next tokens, preempting the last ones while short."""
        while self.running:
            items = self._plan_running()
            if self._extend(items):
                batch.items = items
                return
            victim = max(self.running.values(), key=lambda request: request.sort_key)
            if len(self.running) > 1:
                self._preempt(victim)
                batch.preempted.append(victim)
            else:
                self._fail(victim, batch)

    def _extend(self, items: list[ScheduledRequest]) -> bool:
        """Back the items that grow beyond their memory: all or none, in one call."""
        growing = [item for item in items if item.end > item.request.num_extended_tokens]
        ends = [item.end for item in growing]
        if growing and not self.manager.try_extend([item.vtensor for item in growing], ends):
            return False
        for item in growing:
            item.request.num_extended_tokens = item.end
        return True

    def _plan_running(self) -> list[ScheduledRequest]:
        num_left = self.config.max_num_batched_tokens
        items = []
        for request in sorted(self.running.values(), key=lambda request: request.is_prefilling):
            if num_left == 0:
                break
            items.append(_next_tokens(request, num_left))
            num_left -= items[-1].num_tokens
        return items

    def _preempt(self, request: Request) -> None:
        """Back to the queue, to be recomputed (PagedAttention, section 4.5).

        What it has computed is recorded: memory pressure evicts of it only what is needed.
        """
        vtensor = self._leave(request)
        assert vtensor is not None
        self._record(request, vtensor)
        vtensor.release()
        request.requeue()
        request.metrics.num_preemptions += 1
        self.waiting.add(request)

    # Waiting requests.

    def _schedule_waiting(self, batch: Batch) -> None:
        """Admit in order of the queue until tokens, slots or memory run out."""
        num_left = self.config.max_num_batched_tokens - batch.num_tokens
        if len(self.running) >= self.config.max_num_seqs:
            return
        for request in list(self.waiting):
            if num_left == 0 or len(self.running) >= self.config.max_num_seqs:
                return
            num_matched = self._match(request)
            if self._waits_for_prefix(request, num_matched):
                continue
            whole_prompt = request.num_tokens - num_matched
            if not self.config.enable_chunked_prefill and whole_prompt > num_left:
                return
            if not self._admit(request, num_matched):
                if self.running:
                    return
                self._fail(request, batch)
                continue
            batch.items.append(_next_tokens(request, num_left))
            num_left -= batch.items[-1].num_tokens

    def _match(self, request: Request) -> int:
        """Tokens that the prefix cache has now; the last token is always computed."""
        if not self.config.enable_prefix_caching:
            return 0
        num_matched = self.manager.match_prefix(request.token_ids, cache_salt=request.cache_salt)
        return min(num_matched, request.num_tokens - 1)

    def _waits_for_prefix(self, request: Request, num_matched: int) -> bool:
        """Whether a running prefill will soon record more of this prompt than is recorded now."""
        config = self.config
        num_shared = num_matched + config.min_shared_tokens
        if not (config.enable_prefix_caching and config.wait_for_shared_prefix):
            return False
        if num_shared >= request.num_tokens:
            return False
        head = request.token_ids[:num_shared]
        return any(
            other.is_prefilling
            and other.cache_salt == request.cache_salt
            and other.token_ids[:num_shared] == head
            for other in self.running.values()
        )

    def _admit(self, request: Request, num_matched: int) -> bool:
        """Claim a slot and the memory of the whole prefill; False: shortage, nothing changed."""
        manager = self.manager
        num_tokens = request.num_tokens
        if self.running:
            needed = manager.bytes_for(num_tokens + 1) - manager.bytes_for(num_matched)
            reserve = int(self.config.watermark * manager.memory_budget)
            if needed + reserve > manager.available_bytes:
                return False
        vtensor = self._create(request)
        if vtensor is None:
            return False
        self.waiting.remove(request)
        self.running[request.request_id] = request
        request.start(vtensor)
        return True

    def _create(self, request: Request) -> VTensor | None:
        vtensor = self.manager.try_create(
            request.token_ids if self.config.enable_prefix_caching else None,
            cache_salt=request.cache_salt,
            max_cached_tokens=request.num_tokens - 1,
        )
        if vtensor is None:
            return None
        if not vtensor.try_extend(request.num_tokens):
            vtensor.release()
            return None
        request.metrics.chunks_aliased += vtensor.info().chunks_aliased
        return vtensor

    # Leaving.

    def _leave(self, request: Request) -> VTensor | None:
        """Out of both sets; returns the vTensor for the caller to release."""
        if self.running.pop(request.request_id, None) is None:
            self.waiting.discard(request)
        vtensor = request.take_vtensor()
        if vtensor is not None:
            request.metrics.chunks_copied += vtensor.info().chunks_copied
        return vtensor

    def _record(self, request: Request, vtensor: VTensor) -> None:
        if self.config.enable_prefix_caching and request.num_computed_tokens > 0:
            vtensor.record_prefix(request.token_ids[: request.num_computed_tokens])

    def _fail(self, request: Request, batch: Batch) -> None:
        """The only request there is does not fit: more waiting can not help it."""
        manager = self.manager
        message = (
            f"request {request.request_id!r} needs KV memory for {request.num_tokens} tokens "
            f"({manager.bytes_for(request.num_tokens)} bytes), but only {manager.available_bytes} "
            f"bytes of the budget of {manager.memory_budget} can be obtained"
        )
        self.abort([request], "error", message)
        batch.failed.append(request)


def _next_tokens(request: Request, num_left: int) -> ScheduledRequest:
    """The next tokens of a running request, at most num_left of them."""
    assert request.vtensor is not None
    start = request.num_computed_tokens
    end = min(request.num_tokens, start + num_left)
    return ScheduledRequest(request, request.vtensor, start, end, end == request.num_tokens)
