"""KVUse: physical KV memory behind running requests, against what their tokens need."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flexinfer.vtensor import VTensorManager


class KVUse:
    """`see()` after each step; the numbers are of the step at which most was held.

    A chunk that several requests map counts once, and so do the tokens in it.
    """

    def __init__(self, manager: VTensorManager) -> None:
        self._manager = manager
        self.held_bytes = 0
        """Distinct chunks behind running requests."""
        self.needed_bytes = 0
        """KV of the tokens of these requests, shared ones once."""
        self.mean_chunks_beyond = 0.0
        """Chunks a plane that a request held beyond those that its tokens lie in, on average."""
        self.most_chunks_beyond = 0
        """The same of one request, the most over all requests and steps."""

    def see(self) -> None:
        manager = self._manager
        spec = manager.spec
        live = [one for one in manager.snapshot().vtensors if one.state == "live"]
        beyond = [
            one.mapped_bytes // (manager.chunk_bytes * spec.num_planes)
            - -(-one.num_tokens * spec.plane_token_bytes // manager.chunk_bytes)
            for one in live
        ]
        self.most_chunks_beyond = max([self.most_chunks_beyond, *beyond])
        stats = manager.stats()
        held_bytes = stats.mapped_bytes - stats.saved_bytes
        if held_bytes > self.held_bytes:
            num_tokens = sum(one.num_tokens for one in live)
            self.held_bytes = held_bytes
            self.needed_bytes = num_tokens * spec.bytes_per_token - stats.saved_bytes
            self.mean_chunks_beyond = sum(beyond) / len(live)
