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
        """Chunks a plane that a request held beyond what its tokens need, on average."""
        self.most_chunks_beyond = 0.0
        """The same of one request, the most over all requests and steps."""

    def see(self) -> None:
        manager = self._manager
        token_bytes = manager.spec.bytes_per_token
        row_bytes = manager.chunk_bytes * manager.spec.num_planes
        live = [one for one in manager.snapshot().vtensors if one.state == "live"]
        beyond = [one.mapped_bytes - one.num_tokens * token_bytes for one in live]
        self.most_chunks_beyond = max([self.most_chunks_beyond, *(x / row_bytes for x in beyond)])
        stats = manager.stats()
        held_bytes = stats.mapped_bytes - stats.saved_bytes
        if held_bytes > self.held_bytes:
            self.held_bytes = held_bytes
            self.needed_bytes = held_bytes - sum(beyond)
            self.mean_chunks_beyond = sum(beyond) / row_bytes / len(live)
