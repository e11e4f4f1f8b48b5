"""SwappedRequests: requests whose KV is in the host store, and the ways out and back. No torch.

What a swap moves and how long it takes teaches the preemption policy. Not thread-safe.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator

from sortedcontainers import SortedKeyList

from flexinfer.errors import DriverError
from flexinfer.scheduler.admission import Admission
from flexinfer.scheduler.preemption import Decision, PreemptionPolicy
from flexinfer.scheduler.queue import SortKey
from flexinfer.scheduler.request import Request

logger = logging.getLogger(__name__)


class SwappedRequests:
    """In the order in which they come back."""

    def __init__(
        self, key: Callable[[Request], SortKey], policy: PreemptionPolicy, admission: Admission
    ) -> None:
        self._requests: SortedKeyList[Request] = SortedKeyList(key=key)
        self._policy = policy
        self._admission = admission
        self._bytes_per_token = admission.manager.spec.bytes_per_token
        self._has_warned = False

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request in self._requests

    def discard(self, request: Request) -> None:
        self._requests.discard(request)

    def choose(self, request: Request) -> Decision:
        """Whether a victim is to be moved out, or computed again: what is recorded anyhow needs
        neither computing nor copying back."""
        num_lost = request.num_computed_tokens
        if self._policy.mode == "auto":
            num_lost -= min(num_lost, self._admission.match(request))
        num_bytes = request.num_extended_tokens * self._bytes_per_token
        return self._policy.choose(num_lost, num_bytes, num_lost * self._bytes_per_token)

    def try_move_out(self, request: Request) -> bool:
        """False: no room in the store, or on the disk under it; nothing changed."""
        vtensor = request.vtensor
        assert vtensor is not None
        start_s = time.perf_counter()
        try:
            if not vtensor.try_swap_out():
                return False
        except DriverError as error:  # a full disk, which the store's size does not know of
            self._warn(error)
            return False
        if request.next_state is not None:
            request.next_state.release()
            request.next_state = None
        if request.state is not None:  # where the store has no room for it, it stays in memory
            request.is_state_swapped = request.state.try_swap_out()
        self._observe(request, start_s)
        self._requests.add(request)
        return True

    def try_move_in(self, request: Request, running: Collection[Request]) -> bool:
        """To the same addresses. False: shortage, the request stays here."""
        vtensor = request.vtensor
        assert vtensor is not None
        needed = self._admission.manager.bytes_for(request.num_tokens + 1)
        needed += self._admission.states.bytes_for(1)
        if running and not self._admission.has_room(needed, running):
            return False
        start_s = time.perf_counter()
        if request.state is not None and request.is_state_swapped:
            if not request.state.try_swap_in():
                return False
            request.is_state_swapped = False
        if not vtensor.try_swap_in(request.token_array[: request.num_computed_tokens]):
            return False
        self._observe(request, start_s)
        self._requests.remove(request)
        request.num_asked_rows = 0
        return True

    def _warn(self, error: DriverError) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("requests are computed again instead of swapped: %s", error)

    def _observe(self, request: Request, start_s: float) -> None:
        num_bytes = request.num_extended_tokens * self._bytes_per_token
        self._policy.observe_swap(num_bytes, time.perf_counter() - start_s)
