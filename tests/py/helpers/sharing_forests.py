"""Random batches whose requests share ranges, as `VTensorManager.shared_ranges` would tell them."""

from __future__ import annotations

from random import Random

from flexinfer.attention.segments import Segment, SharedRange


def random_batch(
    random: Random, num_segments: int, *, decode_share: float = 0.7, max_length: int = 12
) -> tuple[list[Segment], list[SharedRange]]:
    """Segments, one-token ones first, and the forest of what they share.

    Ranges and what follows them are 1 to `max_length` tokens long; slots are a random permutation.
    """
    num_new = sorted(
        1 if random.random() < decode_share else random.randint(2, 6) for _ in range(num_segments)
    )
    slots = random.sample(range(num_segments), num_segments)
    shared_tokens = [0] * num_segments
    ranges: list[SharedRange] = []

    def grow(members: list[int], start: int) -> None:
        """The members share [0, start); they may share more, all of them or parts."""
        if len(members) < 2:
            return
        if random.random() < 0.8:
            end = start + random.randint(1, max_length)
            ranges.append(SharedRange(slots[members[0]], start, end, tuple(members)))
            for member in members:
                shared_tokens[member] = end
            parts = random.choice((0, 2, 2, 3))
        elif start == 0:
            end, parts = 0, 2
        else:
            return
        groups: list[list[int]] = [[] for _ in range(parts + 1)]  # the last one parts for good
        for member in members:
            random.choice(groups).append(member)
        for group in groups[:-1]:
            grow(group, end)

    grow(list(range(num_segments)), 0)
    segments, row = [], 0
    for i in range(num_segments):
        start = shared_tokens[i] + random.randint(0, max_length)
        segments.append(Segment(slots[i], row, start, start + num_new[i]))
        row += num_new[i]
    return segments, ranges


def check_forest(ranges: list[SharedRange], segments: list[Segment]) -> None:
    """What AttentionMetadata.shared promises."""
    ends = [0] * len(segments)
    for shared in ranges:
        assert shared.slot in {segments[i].slot for i in shared.members}
        assert len(shared.members) >= 2
        assert list(shared.members) == sorted(shared.members)
        for i in shared.members:
            assert ends[i] == shared.start < shared.end <= segments[i].start
            ends[i] = shared.end
