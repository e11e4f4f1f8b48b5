"""TokenTable: token arrays that two processes name by what both have seen before. No torch.

A prompt is matched, created and recorded in operations of its own, and grows meanwhile; sent whole
each time it would be most of what a step sends. Both sides keep the same table, in the same order.
"""

from __future__ import annotations

from collections import OrderedDict

Encoded = tuple[int, int, bytes]
"""(number, shared, rest): the first `shared` bytes of array `number`, then `rest`; number -1: none
is shared."""

MAX_ARRAYS = 256
MIN_BYTES = 64
"""Shorter arrays are sent as they are, and not remembered; longer ones are found by as many."""


class TokenTable:
    """One side of it: the writer encodes, the reader decodes, in the same order."""

    def __init__(self) -> None:
        self._arrays: OrderedDict[int, bytes] = OrderedDict()  # by number; the oldest first
        self._numbers: dict[bytes, list[int]] = {}  # by the first MIN_BYTES
        self._next = 0

    def encode(self, tokens: bytes) -> Encoded:
        """tokens: int32 one after the other."""
        best, shared = -1, 0
        for number in self._numbers.get(tokens[:MIN_BYTES], ()):
            length = common_length(self._arrays[number], tokens)
            if length > shared:
                best, shared = number, length
        encoded = (best, shared, tokens[shared:])
        self._learn(best, shared, tokens)
        return encoded

    def decode(self, encoded: Encoded) -> bytes:
        number, shared, rest = encoded
        tokens = rest if number < 0 else self._arrays[number][:shared] + rest
        self._learn(number, shared, tokens)
        return tokens

    def _learn(self, number: int, shared: int, tokens: bytes) -> None:
        """Remember an array; one that continues a known one takes its place."""
        if len(tokens) < MIN_BYTES:
            return
        if number >= 0 and shared == len(tokens):
            return  # a part of a known one
        if number >= 0 and shared == len(self._arrays[number]):
            self._arrays[number] = tokens
            return
        self._arrays[self._next] = tokens
        self._numbers.setdefault(tokens[:MIN_BYTES], []).append(self._next)
        self._next += 1
        if len(self._arrays) > MAX_ARRAYS:
            oldest, forgotten = self._arrays.popitem(last=False)
            numbers = self._numbers[forgotten[:MIN_BYTES]]
            numbers.remove(oldest)
            if not numbers:
                del self._numbers[forgotten[:MIN_BYTES]]


def common_length(one: bytes, other: bytes) -> int:
    """Bytes at the start that are the same."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
