"""PrefixIndex: what each replica probably has cached, imitated from what was sent there.

Each replica is taken for a least-recently-used cache of a known size. Its blocks are touched from
the last to the first, so that the beginning of a prompt outlives its end, as in a radix tree.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence


class PrefixIndex:
    """Replicas go by numbers of the caller's; one that nothing was added for has nothing."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        """Of each replica."""
        self._cached: defaultdict[int, OrderedDict[int, None]] = defaultdict(OrderedDict)
        self._owners: dict[int, set[int]] = {}

    def add(self, replica: int, blocks: Sequence[int]) -> None:
        """The replica has computed a prompt with these blocks, or will have before another that is
        sent there."""
        cached = self._cached[replica]
        for block in reversed(blocks):
            if block in cached:
                cached.move_to_end(block)
            else:
                cached[block] = None
                self._owners.setdefault(block, set()).add(replica)
        while len(cached) > self.max_blocks:
            block, _ = cached.popitem(last=False)
            self._disown(replica, block)

    def clear(self, replica: int) -> None:
        """The replica has lost everything, as when it ends or starts anew."""
        for block in self._cached.pop(replica, ()):
            self._disown(replica, block)

    def num_blocks(self, replica: int) -> int:
        return len(self._cached.get(replica, ()))

    def matches(self, blocks: Sequence[int]) -> dict[int, int]:
        """replica -> how many of the first blocks it has; those that have none are left out."""
        found: dict[int, int] = {}
        for replica in self._owners.get(blocks[0], ()) if blocks else ():
            cached = self._cached[replica]
            low, high = 1, len(blocks)
            while low < high:  # what is there is a beginning: the end goes first
                middle = (low + high + 1) // 2
                low, high = (middle, high) if blocks[middle - 1] in cached else (low, middle - 1)
            found[replica] = low
        return found

    def _disown(self, replica: int, block: int) -> None:
        owners = self._owners[block]
        owners.discard(replica)
        if not owners:
            del self._owners[block]
