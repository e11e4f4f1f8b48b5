"""What a step is made of: each request's segment of the batch, and ranges of KV that several share.

No torch here, and nothing of how attention is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens of one request in the batch."""

    slot: int
    row: int
    """Index of its first token in the flat batch."""
    start: int
    """Position of its first token in the request: the number of tokens that have KV already."""
    end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


class SharedRange(NamedTuple):
    """Tokens whose KV several segments hold in the same chunks: a node of ChunkAttention's tree.

    A tuple, as the manager gives it and the host kernel takes it.
    """

    slot: int
    """One of the members', to read from."""
    start: int
    end: int
    """Tokens [start, end): whole chunks, and all of it is before each member's first new token."""
    members: tuple[int, ...]
    """Indices of the segments, ascending, at least two."""
