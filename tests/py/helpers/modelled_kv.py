"""What a random operation on a manager is compared with: KV as numbers, and how it is opened."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from flexinfer.vtensor import KVGroup, KVSpec

MAX_SEQ_LEN = 96


def kv_of(salt: str, tokens: list[int]) -> np.ndarray[Any, Any]:
    """KV numbers of each token, ``[tokens]`` float32: exact in float16 as well, never 0."""
    numbers = np.empty(len(tokens), dtype=np.float32)
    state = zlib.crc32(salt.encode())
    for i, token in enumerate(tokens):
        state = zlib.crc32(bytes([token]), state)
        numbers[i] = 1 + state % 2000
    return numbers


def common_prefix(a: list[int], b: list[int]) -> int:
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length


@dataclass(frozen=True)
class Setup:
    """A manager's configuration. ``token_elements`` does not divide a chunk where it is odd."""

    chunk_bytes: int
    dtype: str = "float32"
    heads_x_dim: tuple[int, int] = (2, 64)
    layers_per_plane: int = 2
    budget_chunks: int = 48
    max_requests: int = 5
    park: bool = True
    alias: bool = True
    scrub: str = "owner"
    idle_chunks: int | None = None
    groups: tuple[KVGroup, ...] = ()

    def spec(self) -> KVSpec:
        if self.groups:
            return KVSpec.of_groups(
                self.groups, MAX_SEQ_LEN, sum(len(g.layers) for g in self.groups)
            )
        heads, dim = self.heads_x_dim
        return KVSpec(2, heads, dim, self.dtype, MAX_SEQ_LEN, self.layers_per_plane)
