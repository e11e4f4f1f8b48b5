"""Shared ranges by their definition: token by token, from the snapshot's page tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from flexinfer.vtensor import Snapshot, VTensor, VTensorManager

Range = tuple[int, int, int, tuple[int, ...]]


def check_shared_ranges(
    manager: VTensorManager, vtensors: Sequence[VTensor], lengths: Sequence[int]
) -> list[Range]:
    """The manager's ranges, after comparing them with the definition."""
    ranges = manager.shared_ranges(vtensors, lengths)
    expected = _sharers(manager, manager.snapshot(), vtensors, lengths)
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    ends = [0] * len(vtensors)
    before: list[tuple[int, ...] | None] = [None] * len(vtensors)
    for slot, start, end, members in ranges:
        assert slot == vtensors[members[0]].slot
        assert start < end
        assert list(members) == sorted(members)
        for member in members:
            assert start == ends[member], "the ranges of one member touch and stand in order"
            assert members != before[member], "adjacent ranges of the same members are one"
            ends[member], before[member] = end, members
            found.update({(member, token): members for token in range(start, end)})
    assert found == expected
    return ranges


def _sharers(
    manager: VTensorManager,
    snapshot: Snapshot,
    vtensors: Sequence[VTensor],
    lengths: Sequence[int],
) -> dict[tuple[int, int], tuple[int, ...]]:
    """{(index, token): indices of all that hold the token, and all before it, in equal chunks}."""
    tables = {info.id: list(info.table) for info in snapshot.vtensors}
    groups: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
    token_bytes = manager.spec.plane_token_bytes
    for index, (vtensor, length) in enumerate(zip(vtensors, lengths, strict=True)):
        full_rows = length * token_bytes // manager.chunk_bytes
        for token in range(length):
            num_rows = -(-(token + 1) * token_bytes // manager.chunk_bytes)
            if num_rows <= full_rows:
                chunks = tables[vtensor.id][: num_rows * snapshot.num_planes]
                groups[(token, *chunks)].append((index, token))
    sharers = {}
    for group in groups.values():
        if len(group) > 1:
            members = tuple(index for index, _ in group)
            sharers.update(dict.fromkeys(group, members))
    return sharers
