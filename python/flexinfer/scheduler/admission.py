"""Admission: whether a waiting request may start, and the vTensor that it starts with. No torch.

`running` is always the requests that run now. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from flexinfer.scheduler.request import Request
from flexinfer.scheduler.states import States
from flexinfer.scheduler_config import SchedulerConfig
from flexinfer.types import CacheLimit

if TYPE_CHECKING:
    from flexinfer.vtensor import VTensor, VTensorManager


def release_all(vtensors: Iterable[VTensor]) -> None:
    for vtensor in vtensors:
        vtensor.release()


class Admission:
    """Asks the manager for room, for cached prefixes, for vTensors."""

    def __init__(self, config: SchedulerConfig, manager: VTensorManager, states: States) -> None:
        self.config = config
        self.manager = manager
        self.states = states

    def match(self, request: Request) -> int:
        """Tokens that the prefix cache has now and that need not be computed."""
        if not self.config.enable_prefix_caching:
            return 0
        most = request.num_reusable_tokens
        return self.num_usable(request.token_array, request.cache_salt, most)

    def num_usable(self, tokens: Any, cache_salt: str, most: int) -> int:
        """Of these tokens, those behind which a request could go on, but no more than `most`. From
        any thread."""
        num_matched = min(self.manager.match_prefix(tokens, cache_salt), most)
        while self.states.are_kept:  # where there are windows, KV may not be usable at that length
            num_behind = self.states.snapshots.longest(tokens, cache_salt, num_matched)
            num_matched = self.manager.match_prefix(tokens[:num_behind], cache_salt)
            if num_matched == num_behind:
                break
        return num_matched

    def waits_for_prefix(
        self, request: Request, num_matched: int, running: Collection[Request]
    ) -> bool:
        """Whether a running prefill will soon record more of this prompt than is recorded now.

        An overdue request waits no more, so that waiting cannot starve it.
        """
        config = self.config
        num_shared = self.states.next_stop(num_matched + config.min_shared_tokens)
        if not (config.enable_prefix_caching and config.wait_for_shared_prefix):
            return False
        if num_shared > request.num_reusable_tokens or request.is_overdue:
            return False
        prefilling = [
            other
            for other in running
            if other.is_prefilling and other.cache_salt == request.cache_salt
        ]
        if not prefilling:
            return False
        head = request.token_ids[:num_shared]
        return any(other.token_ids[:num_shared] == head for other in prefilling)

    def has_room(self, needed_bytes: int, running: Collection[Request]) -> bool:
        """Whether so much can be had beside what running prefills were promised, and a reserve
        for decodes to grow."""
        manager = self.manager
        promised = sum(
            manager.bytes_for(request.num_prefill_tokens + 1)
            - manager.bytes_for(request.num_extended_tokens)
            for request in running
            if request.is_prefilling
        )
        reserve = int(self.config.admission_reserve * manager.memory_budget)
        return needed_bytes + promised + reserve <= manager.available_bytes

    def try_create(
        self, request: Request, num_matched: int, num_left: int, running: Collection[Request]
    ) -> VTensor | None:
        """Start the request, if the whole prefill will fit: a slot, the cached prefix, and memory
        for the first chunk of at most `num_left` tokens. None: shortage, nothing changed."""
        manager = self.manager
        needed = manager.bytes_for(request.num_tokens + 1)
        needed += request.num_forks * manager.bytes_for(1)  # a tail row each
        needed += self.states.bytes_for(1 + request.num_forks)
        # What a window shows of the match is not what it holds in the end.
        shared = manager.bytes_for(num_matched, with_windows=False)
        if running and not self.has_room(needed - shared, running):
            return None
        for most in self._lengths_to_share(request, num_matched, running):
            vtensor = self._try_create(request, most, wait=not running)
            if vtensor is None:
                return None
            end = self._first_end(request, vtensor, needed, num_left, running)
            if end is not None and self.states.try_extend([request], [vtensor], [end]):
                break
            release_all([vtensor, *request.take_vtensors()])
        else:
            return None
        request.metrics.chunks_aliased += vtensor.info().chunks_aliased
        if request.cache_limit is None:
            is_cut = most < num_matched
            request.cache_limit = "memory" if is_cut else self._cache_limit(request, vtensor)
        request.start(vtensor, end)
        return vtensor

    def _lengths_to_share(
        self, request: Request, num_matched: int, running: Collection[Request]
    ) -> list[int]:
        """Of the cached prefix, most tokens first. Where it ends inside of a row, that row is there
        twice, recorded and copied: a request that is alone, and needs all of the budget, fits with
        fewer."""
        most = request.num_reusable_tokens if self.config.enable_prefix_caching else 0
        if running or num_matched == 0:
            return [most]
        row_tokens = self.manager.chunk_bytes // self.manager.spec.plane_token_bytes
        return [most, num_matched - num_matched % max(1, row_tokens), 0]

    def _cache_limit(self, request: Request, vtensor: VTensor) -> CacheLimit:
        """Why no more of the request is shared."""
        if not self.config.enable_prefix_caching:
            return "off"
        if vtensor.num_cached_tokens >= request.num_reusable_tokens:
            return "complete"
        if vtensor.info().cut_by_window:
            return "window"
        if self.states.are_kept:  # KV was asked for up to the last state alone
            num_usable = self.manager.match_prefix(request.token_array, request.cache_salt)
            return "state" if num_usable > vtensor.num_cached_tokens else "not recorded"
        return "not recorded"

    def _try_create(self, request: Request, max_cached: int, *, wait: bool) -> VTensor | None:
        """A vTensor with the request's cached prefix, and where the model keeps a state the one
        behind it. None: no slot is left, or with `wait` none that only a step still reads."""
        if self.states.are_kept:
            max_cached = self.num_usable(request.token_array, request.cache_salt, max_cached)
            if not self.states.open(request, max_cached):
                max_cached = 0
        vtensor = self.manager.try_create(
            request.token_array,
            cache_salt=request.cache_salt,
            max_cached_tokens=max_cached,
            expected_tokens=request.num_tokens,
            to_export=self.config.to_export,
            wait=wait,
            label=request.request_id if self.config.label_vtensors else None,
        )
        if vtensor is None:
            release_all(request.take_vtensors())
        return vtensor

    def most_bytes(self, request: Request) -> int:
        """What the request alone, without forks, holds at most; its last token needs no KV."""
        return self.manager.bytes_for(request.max_num_tokens - 1) + self.states.bytes_for(1)

    def explain_shortage(self, request: Request, num_others: int = 0) -> str:
        """For the caller of a request that does not fit; num_others: requests that run and are not
        preempted for it."""
        manager = self.manager
        needed = manager.bytes_for(request.num_tokens)
        needed += self.states.bytes_for(1 + request.num_forks)
        held = manager.bytes_for(request.num_extended_tokens)
        has = f", of which it has {held}" if held else ""
        found = (
            f", but only {manager.available_bytes} bytes of the budget of {manager.memory_budget} "
            "are available"
        )
        if needed <= manager.available_bytes:
            found = (
                ": the budget has them, but the system gives no more memory. Other processes, or "
                "the limit of a container, leave too little"
            )
        if num_others > 0:
            found += f" to all; {num_others} other requests run and preemption is off"
        return (
            f"request {request.request_id!r} needs KV memory for {request.num_tokens} tokens "
            f"({needed} bytes{has}){found}"
        )

    def _first_end(
        self,
        request: Request,
        vtensor: VTensor,
        needed: int,
        num_left: int,
        running: Collection[Request],
    ) -> int | None:
        """Tokens to back at once; None: the rest would not fit.

        The worker maps the rest while the first chunk is computed. A request that is alone claims
        all at once where room is not certain: that tells exactly whether it fits.
        """
        manager = self.manager
        num_cached = vtensor.num_cached_tokens
        # Aliased whole rows need nothing more, and cannot be evicted any more.
        needed -= manager.bytes_for(num_cached, with_windows=False)
        needed += manager.bytes_for(1) if num_cached else 0
        # With windows the whole prompt at once would take more than it ever holds.
        if self.has_room(needed, running) or (not running and manager.spec.windows):
            return min(request.num_tokens, num_cached + num_left)
        return None if running else request.num_tokens
