"""Snapshots: recurrent states that are kept beside recorded prefixes, at chosen lengths. No torch.

A snapshot is a recorded prefix itself, and is aliased, evicted, pinned and forgotten like others:
the "tokens" under which a state is recorded are a digest of the tokens that it stands behind. What
is kept here is only which digests there may be, and of which length. From any thread.

    recorded KV          t0 t1 t2 ............................. t700
    snapshots behind         512 tokens ^        700 tokens ^        of which one is read by a hit
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from threading import RLock
from typing import TYPE_CHECKING

from sortedcontainers import SortedDict

if TYPE_CHECKING:
    from flexinfer.vtensor import VTensor, VTensorManager

_WORDS = 8  # no more than `MIN_TOKENS` of a state: a key holds the whole digest


class Snapshots:
    """
    Invariant: `_num_of` counts the digests of `_length_of` by their length; `_salt_of` has the
    same digests.
    """

    def __init__(self, manager: VTensorManager, num_tokens: int, max_count: int) -> None:
        """num_tokens: of the vTensor that holds a state. max_count: no more than that are
        remembered: those that are no longer there are forgotten first, then the least recently
        used."""
        self._manager = manager
        self._num_tokens = num_tokens
        self._max_count = max_count
        self._length_of: OrderedDict[bytes, int] = OrderedDict()
        self._salt_of: dict[bytes, str] = {}
        self._num_of: SortedDict[int, int] = SortedDict()
        self._lock = RLock()  # exports look for snapshots beside steps

    def __len__(self) -> int:
        """Snapshots that there may be: what was evicted is found out when it is looked for."""
        return len(self._length_of)

    def add(self, tokens: array[int], cache_salt: str, state: VTensor) -> bool:
        """Record `state`, which stands behind `tokens`. False: it is recorded already."""
        digest = _hash(cache_salt, tokens).digest()
        with self._lock:
            if self._is_there(digest, cache_salt):
                return False
            state.record_prefix(self._key(digest))
            self._length_of[digest] = len(tokens)
            self._num_of[len(tokens)] = self._num_of.get(len(tokens), 0) + 1
            self._salt_of[digest] = cache_salt
            self._forget_surplus()
            return True

    def longest(self, tokens: array[int], cache_salt: str, max_tokens: int) -> int:
        """The length of the longest beginning of `tokens`, of at most max_tokens, that has a
        snapshot behind it; 0: none has. Marks it as used now."""
        with self._lock:
            found = self._find(tokens, cache_salt, max_tokens)
            return 0 if found is None else self._length_of[found]

    def open(self, tokens: array[int], cache_salt: str) -> VTensor | None:
        """A vTensor that aliases the state behind all of `tokens`. None: there is none, or no slot
        is left."""
        digest = _hash(cache_salt, tokens).digest()
        with self._lock:
            if not self._is_there(digest, cache_salt):
                return None
            return self._manager.try_create(self._key(digest), cache_salt=cache_salt, wait=True)

    def pin_prefix(
        self, token_ids: Sequence[int], owner: str, ttl_s: float | None, cache_salt: str
    ) -> int:
        """Keep what is recorded of `token_ids` from eviction, and the last state behind it. Returns
        the pinned tokens, as `VTensorManager.pin_prefix` does."""
        num_pinned = self._manager.pin_prefix(token_ids, owner, ttl_s, cache_salt)
        with self._lock:
            found = self._find(array("i", token_ids), cache_salt, num_pinned)
            if found is not None:
                self._manager.pin_prefix(self._key(found), owner, ttl_s, cache_salt)
        return num_pinned

    def _find(self, tokens: array[int], cache_salt: str, max_tokens: int) -> bytes | None:
        found = []
        digests = _hash(cache_salt, tokens[:0])
        hashed = 0
        for length in self._num_of.irange(maximum=min(max_tokens, len(tokens))):
            digests.update(tokens[hashed:length])
            hashed = length
            if digests.digest() in self._length_of:
                found.append(digests.digest())
        while found:
            digest = found.pop()
            if self._is_there(digest, cache_salt):
                return digest
        return None

    def _is_there(self, digest: bytes, cache_salt: str) -> bool:
        if digest not in self._length_of:
            return False
        if self._manager.match_prefix(self._key(digest), cache_salt) < self._num_tokens:
            self._forget(digest)
            return False
        self._length_of.move_to_end(digest)
        return True

    def _forget_surplus(self) -> None:
        """Pinned ones are there however long nobody has used them."""
        for _ in range(len(self._length_of)):
            if len(self._length_of) <= self._max_count:
                return
            oldest = next(iter(self._length_of))
            self._is_there(oldest, self._salt_of[oldest])
        if len(self._length_of) > self._max_count:
            self._forget(next(iter(self._length_of)))

    def _forget(self, digest: bytes) -> None:
        del self._salt_of[digest]
        length = self._length_of.pop(digest)
        self._num_of[length] -= 1
        if not self._num_of[length]:
            del self._num_of[length]

    def _key(self, digest: bytes) -> array[int]:
        """Numbers below 0, which no token has: no prompt meets a state."""
        words = array("i", digest)
        words = array("i", (word | -(1 << 31) for word in words))
        return (words + array("i", [-1]) * self._num_tokens)[: self._num_tokens]


def _hash(cache_salt: str, tokens: array[int]) -> hashlib.blake2b:
    salt = cache_salt.encode()
    digests = hashlib.blake2b(b"%d:" % len(salt) + salt, digest_size=4 * _WORDS)
    digests.update(tokens)
    return digests
