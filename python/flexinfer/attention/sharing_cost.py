"""The cost model of two-phase attention: which shared ranges are worth a call of their own.

A decode step reads the KV of every request once per layer, and a range that n requests share n
times (ChunkAttention, section 3; docs/two_phase.md has the derivation). Calling it once for all
saves (n - 1) reads of it and costs one more call and n merges of partial results. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flexinfer.attention.segments import Segment, SharedRange


@dataclass(frozen=True, slots=True)
class SharingCost:
    """One layer of one implementation on one kind of machine, measured."""

    token_bytes: int
    """K and V of one token in one layer."""
    bytes_per_us: float
    """KV that one microsecond of a decode goes through: what a read that is saved is worth."""
    call_us: float
    """One more call, whatever its size: its overhead, and that of gathering queries."""
    merge_us: float
    """One query token's part in it: gathered before, its partial result merged afterwards."""
    max_query_tokens: int = 1
    """Segments with more new tokens than this stay out: they read KV once for all of them."""

    def gain_us(self, num_tokens: int, num_readers: int, num_queries: int) -> float:
        """Microseconds per layer that one call for all readers saves over `num_readers` reads:
        equation 4 of docs/two_phase.md.

        A range's readers are its members, but those for which a call further down reads it too
        count as one. num_queries: query tokens of all members.
        """
        saved_bytes = num_tokens * (num_readers - 1) * self.token_bytes
        return saved_bytes / self.bytes_per_us - self.call_us - num_queries * self.merge_us


@dataclass(slots=True)
class _Node:
    """A range that at least two of the segments that take part share."""

    start: int
    end: int
    members: tuple[int, ...]
    num_queries: int
    parent: _Node | None
    children: list[_Node] = field(default_factory=list)
    num_readers: int = 0
    """Reads of this range if it has no call of its own."""
    chosen: bool = False


def choose_ranges(
    ranges: Sequence[SharedRange], segments: Sequence[Segment], cost: SharingCost
) -> list[SharedRange]:
    """The calls of the chunk-first phase: what to compute once for several decodes.

    `ranges` as in AttentionMetadata.shared. The result is such a forest again, of the segments
    that take part: a range that is not worth a call goes to its children's calls or to its members'
    own suffixes, so that each member is covered from token 0 to the end of its last range.

    Two passes over the forest. Upwards, a range is chosen if it pays for its own tokens, given what
    was chosen below. Downwards, one that did not is chosen if it pays together with the ranges
    above it that are still uncovered. Each choice lowers the modelled time, so the result is never
    worse than no sharing; for one range, or ranges side by side, it is the best.
    """
    nodes = _forest(ranges, segments, cost.max_query_tokens)
    for node in reversed(nodes):
        in_children = sum(len(child.members) for child in node.children)
        node.num_readers = len(node.members) - in_children
        node.num_readers += sum(1 if c.chosen else c.num_readers for c in node.children)
        node.chosen = _pays(node, cost)
    for node in nodes:
        if node.parent is not None and not node.parent.chosen:
            node.start = node.parent.start
            node.chosen = node.chosen or _pays(node, cost)
    return [
        SharedRange(segments[node.members[0]].slot, node.start, node.end, node.members)
        for node in nodes
        if node.chosen
    ]


def total_gain_us(
    chosen: Sequence[SharedRange], segments: Sequence[Segment], cost: SharingCost
) -> float:
    """Microseconds per layer that all calls of `chosen` save, as `choose_ranges` gives them.

    They cover each member from token 0 on without gaps, so that each range is read once for all its
    members, and without sharing once for each.
    """
    return sum(
        cost.gain_us(
            shared.end - shared.start,
            len(shared.members),
            sum(segments[i].num_tokens for i in shared.members),
        )
        for shared in chosen
    )


def _pays(node: _Node, cost: SharingCost) -> bool:
    return cost.gain_us(node.end - node.start, node.num_readers, node.num_queries) > 0


def _forest(
    ranges: Sequence[SharedRange], segments: Sequence[Segment], max_query_tokens: int
) -> list[_Node]:
    """The ranges as nodes, parents first, without the segments that stay out."""
    nodes: list[_Node] = []
    last: dict[int, _Node] = {}  # of each member
    for shared in ranges:
        members = tuple(i for i in shared.members if segments[i].num_tokens <= max_query_tokens)
        if len(members) < 2:
            continue
        num_queries = sum(segments[i].num_tokens for i in members)
        node = _Node(shared.start, shared.end, members, num_queries, last.get(members[0]))
        if node.parent is not None:
            node.parent.children.append(node)
        nodes.append(node)
        last.update(dict.fromkeys(members, node))
    return nodes
