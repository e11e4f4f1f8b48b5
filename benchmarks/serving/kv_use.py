"""KVUse: physical KV memory behind running requests, against what their tokens need."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flexinfer import LLMEngine


class KVUse:
    """`see()` after each step; the numbers are of the step at which most was held.

    A request's tokens are its prompt and what it has generated. A chunk that several requests map
    counts once, and so do the tokens in it.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self.held_bytes = 0
        """Distinct chunks behind running requests."""
        self.needed_bytes = 0
        """KV of the tokens of these requests, shared ones once."""
        self.mean_chunks_beyond = 0.0
        """Chunks a plane that a request held beyond those that its tokens lie in, on average."""
        self.most_chunks_beyond = 0
        """The same of one request, the most over all requests and steps."""

    def see(self) -> None:
        manager = self._engine.manager
        spec = manager.spec
        row_bytes = manager.chunk_bytes * spec.num_planes
        num_tokens = 0
        beyond = []
        for request in self._engine.scheduler.running.values():
            assert request.vtensor is not None  # it runs
            num_rows = -(-request.num_tokens * spec.plane_token_bytes // manager.chunk_bytes)
            beyond.append(request.vtensor.info().mapped_bytes // row_bytes - num_rows)
            num_tokens += request.num_tokens
        self.most_chunks_beyond = max([self.most_chunks_beyond, *beyond])
        stats = manager.stats()
        held_bytes = stats.mapped_bytes - stats.saved_bytes
        if held_bytes > self.held_bytes:
            self.held_bytes = held_bytes
            self.needed_bytes = num_tokens * spec.bytes_per_token - stats.saved_bytes
            self.mean_chunks_beyond = sum(beyond) / len(beyond)
