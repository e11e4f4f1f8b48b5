"""StepsInFlight: steps that have been launched and whose results are not known. No torch.

With asynchronous scheduling the next step is launched before the tokens of the last are known. A
request that these tokens end is computed once more, in vain; what it holds is freed after that.
"""

from __future__ import annotations

from flexinfer.scheduler.batch import Batch
from flexinfer.scheduler.request import Request


class StepsInFlight:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._ended: dict[Request, None] = {}

    def launch(self, batch: Batch) -> None:
        for item in batch.items:
            item.request.num_launched_tokens = item.end

    def land(self, batch: Batch) -> None:
        """Its tokens have KV."""
        for item in batch.items:
            request = item.request
            request.num_computed_tokens = item.end
            request.num_launched_tokens = max(request.num_launched_tokens, item.end)
            request.metrics.num_computed_tokens += item.num_tokens
            request.note_scored(item.end)

    def drop(self, batch: Batch) -> None:
        """Its tokens are to be computed again. REQUIRES: no later step is in flight."""
        for item in batch.items:
            item.request.num_launched_tokens = item.request.num_computed_tokens

    def keeps(self, request: Request) -> bool:
        """Whether this request, which has ended, is still in flight; `take_landed` has it later."""
        if request.is_in_flight:
            self._ended[request] = None
        return request.is_in_flight

    def take_landed(self) -> list[Request]:
        """Those that were kept and are in flight no more."""
        landed = [request for request in self._ended if not request.is_in_flight]
        for request in landed:
            del self._ended[request]
        return landed
