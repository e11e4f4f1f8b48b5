"""Block hashes: what a router knows of a prompt. Equal hashes mean equal beginnings."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

BLOCK_TOKENS = 16
"""Of one hash, as in the KV events of vLLM."""


def hash_blocks(tokens: Sequence[int], salt: str = "") -> list[int]:
    """One hash for each whole block of the prompt, each of everything up to its end; of another
    tenant's salt, others. Good within this process alone."""
    data = memoryview(array("i", tokens)).cast("B")
    size = BLOCK_TOKENS * 4
    hashes: list[int] = []
    last = hash(salt)
    for end in range(size, len(data) + 1, size):
        last = hash((last, bytes(data[end - size : end])))
        hashes.append(last)
    return hashes
