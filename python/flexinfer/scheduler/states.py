"""States: the recurrent states of requests, for models that keep one beside KV. No torch.

A state is a vTensor of its own (`KVSpec.state`) whose bytes each step replaces. A step reads the
state behind the tokens that are computed and writes the one behind its own:

    request.state        -- read -->  step  -- write -->  request.next_state, or the same in place

In place, unless others see it: it is recorded as a snapshot, or a fork shares it. Then the step
writes to a fresh vTensor, which takes its place when the step has landed: copy on write without the
copy, since all of it is written anew.

Where the model keeps no state (`num_tokens` is 0) nothing happens here. Not thread-safe.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from flexinfer.scheduler.batch import ScheduledRequest
from flexinfer.scheduler.request import Request
from flexinfer.scheduler.snapshots import Snapshots
from flexinfer.scheduler_config import SchedulerConfig

if TYPE_CHECKING:
    from flexinfer.vtensor import VTensor, VTensorManager


class States:
    """
    Invariants:
    1. `request.state` is the one behind its `num_computed_tokens`, or None where these are 0.
    2. What is recorded or forked is not written any more (`request.is_state_shared`).
    """

    def __init__(self, config: SchedulerConfig, manager: VTensorManager) -> None:
        self._manager = manager
        self._labels = config.label_vtensors
        self._to_export = config.to_export
        self._num_tokens = manager.spec.state.num_tokens
        self._num_bytes = manager.spec.state_bytes(manager.chunk_bytes)
        self._records = config.enable_prefix_caching and self.are_kept
        self.interval: int | None = None
        """A step of a request ends at multiples of so many tokens, and a snapshot is taken there;
        None: at the ends of prompts and turns alone."""
        if self._records and config.enable_chunked_prefill:
            self.interval = config.state_snapshot_tokens or None
        max_count = max(1, manager.memory_budget // max(1, self._num_bytes))
        self.snapshots = Snapshots(manager, self._num_tokens, max_count)

    @property
    def are_kept(self) -> bool:
        """Whether the model has any."""
        return self._num_tokens > 0

    def bytes_for(self, num_requests: int) -> int:
        """The most that so many requests hold at a time: the state that a step reads, and where it
        cannot be written in place, the one that it writes."""
        writes_in_place = num_requests == 1 and not self._records
        return num_requests * self._num_bytes * (1 if writes_in_place else 2)

    def next_stop(self, num_tokens: int) -> int:
        """The least length, from num_tokens on, behind which others find a state of a prompt that
        is being computed."""
        if not self.are_kept:
            return num_tokens
        return sys.maxsize if not self.interval else -(-num_tokens // self.interval) * self.interval

    def open(self, request: Request, num_tokens: int) -> bool:
        """Have the request start behind so many tokens. False: there is no snapshot any more."""
        if num_tokens == 0:
            return True
        head = request.token_array[:num_tokens]
        request.state = self.snapshots.open(head, request.cache_salt)
        request.is_state_shared = True
        return request.state is not None

    def try_extend(
        self, requests: Iterable[Request], vtensors: Sequence[VTensor], ends: Sequence[int]
    ) -> bool:
        """As `VTensorManager.try_extend` of their KV, and memory for the states that a step of
        these requests writes: all or none."""
        targets = self._create_targets(requests)
        if targets is None:
            return False
        grown = [*vtensors, *(target for _, target in targets)]
        lengths = [*ends, *[self._num_tokens] * len(targets)]
        if grown and not self._manager.try_extend(grown, lengths):
            for _, target in targets:
                target.release()
            return False
        for request, target in targets:
            request.next_state = target
        return True

    def land(self, items: Iterable[ScheduledRequest]) -> None:
        """The step of these items is computed: what it wrote are the states now."""
        for request in (item.request for item in items if self.are_kept):
            if request.next_state is not None:
                if request.state is not None:
                    request.state.release()
                request.state, request.next_state = request.next_state, None
                request.is_state_shared = False
            at_stop = self.interval and request.num_computed_tokens % self.interval == 0
            if at_stop and not request.is_finished:
                self.record(request)

    def record(self, request: Request) -> None:
        """Take a snapshot of where the request is."""
        if request.state is None or not self._records:
            return
        head = request.token_array[: request.num_computed_tokens]
        if self.snapshots.add(head, request.cache_salt, request.state):
            request.is_state_shared = True

    def fork(self, parent: Request, child: Request) -> None:
        """The child goes on where the parent is. Raises OutOfMemoryError: no slot is left."""
        if parent.state is not None:
            child.state = parent.state.fork()
            child.is_state_shared = parent.is_state_shared = True

    def _create_targets(self, requests: Iterable[Request]) -> list[tuple[Request, VTensor]] | None:
        """Empty vTensors for the states that cannot be written in place. None: no slot is left."""
        targets: list[tuple[Request, VTensor]] = []
        for request in requests if self.are_kept else ():
            in_place = request.state is not None and not request.is_state_shared
            if in_place or request.next_state is not None:
                continue
            target = self._manager.try_create(
                cache_salt=request.cache_salt,
                expected_tokens=self._num_tokens,
                to_export=self._to_export,
                wait=True,  # for what the last step still reads: that is no shortage
                label=f"{request.request_id} state" if self._labels else None,
            )
            if target is None:
                for _, created in targets:
                    created.release()
                return None
            targets.append((request, target))
        return targets
