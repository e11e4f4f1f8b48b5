"""`choose_ranges`: which shared ranges get a call of their own."""

from __future__ import annotations

from itertools import combinations
from random import Random

import pytest

pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st

from flexinfer.attention.segments import Segment, SharedRange
from flexinfer.attention.sharing_cost import SharingCost, choose_ranges, total_gain_us
from helpers.sharing_forests import check_forest, random_batch

FREE = SharingCost(token_bytes=1, bytes_per_us=1, call_us=0, merge_us=0)
COSTS = [FREE, SharingCost(1, 1, 5, 0.5), SharingCost(1, 1, 12, 2), SharingCost(1, 1, 0, 4)]
AS_PREFILLS_TOO = SharingCost(1, 1, 4, 0.5, max_query_tokens=6)


def modelled_us(ranges: list[SharedRange], segments: list[Segment], cost: SharingCost) -> float:
    """What the model says a layer takes, by its definition: reads, calls and merges."""
    total = 0.0
    covered = [0] * len(segments)
    for shared in ranges:
        queries = sum(segments[i].num_tokens for i in shared.members)
        total += (shared.end - shared.start) * cost.token_bytes / cost.bytes_per_us
        total += cost.call_us + queries * cost.merge_us
        for i in shared.members:
            covered[i] = shared.end
    for s, start in zip(segments, covered, strict=True):
        total += (s.start - start) * cost.token_bytes / cost.bytes_per_us
    return total


def taking_part(
    ranges: list[SharedRange], segments: list[Segment], cost: SharingCost
) -> list[SharedRange]:
    found = []
    for shared in ranges:
        members = tuple(
            i for i in shared.members if segments[i].num_tokens <= cost.max_query_tokens
        )
        if len(members) > 1:
            slot = segments[members[0]].slot
            found.append(SharedRange(slot, shared.start, shared.end, members))
    return found


def best_us(ranges: list[SharedRange], segments: list[Segment], cost: SharingCost) -> float:
    """The least that any choice of calls takes: all subsets are tried."""
    ranges = taking_part(ranges, segments, cost)
    best = modelled_us([], segments, cost)
    for count in range(1, len(ranges) + 1):
        for subset in combinations(ranges, count):
            ends = [0] * len(segments)
            calls = []
            for shared in subset:
                calls.append(
                    SharedRange(shared.slot, ends[shared.members[0]], shared.end, shared.members)
                )
                for i in shared.members:
                    ends[i] = shared.end
            best = min(best, modelled_us(calls, segments, cost))
    return best


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32), size=st.integers(2, 14), cost=st.sampled_from([*COSTS[1:], FREE])
)
def test_the_choice_is_a_forest_and_never_worse_than_no_sharing(
    seed: int, size: int, cost: SharingCost
) -> None:
    segments, ranges = random_batch(Random(seed), size)
    check_forest(ranges, segments)
    chosen = choose_ranges(ranges, segments, cost)
    check_forest(chosen, segments)
    assert all(segments[i].num_tokens == 1 for shared in chosen for i in shared.members)
    gain_us = modelled_us([], segments, cost) - modelled_us(chosen, segments, cost)
    assert gain_us >= 0
    assert total_gain_us(chosen, segments, cost) == pytest.approx(gain_us)


@pytest.mark.parametrize("cost", [*COSTS, AS_PREFILLS_TOO])
def test_the_choice_is_close_to_the_best_of_all(cost: SharingCost) -> None:
    chosen_us = least_us = 0.0
    for seed in range(300):
        segments, ranges = random_batch(Random(seed), 8)
        if len(ranges) > 7:
            continue
        least = best_us(ranges, segments, cost)
        chosen = modelled_us(choose_ranges(ranges, segments, cost), segments, cost)
        assert chosen <= 1.15 * least
        chosen_us += chosen
        least_us += least
    assert chosen_us <= 1.01 * least_us


def decodes(*starts: int) -> list[Segment]:
    return [Segment(i, i, start, start + 1) for i, start in enumerate(starts)]


def test_a_range_is_called_where_the_reads_saved_outweigh_call_and_merges() -> None:
    ranges = [SharedRange(0, 0, 100, (0, 1, 2))]
    segments = decodes(100, 120, 130)
    pays = SharingCost(10, 20, call_us=70, merge_us=9)  # 2 * 100 * 10 / 20 = 100 > 70 + 27
    assert choose_ranges(ranges, segments, pays) == ranges
    assert choose_ranges(ranges, segments, SharingCost(10, 20, 70, 11)) == []


def test_a_short_trunk_joins_its_branches() -> None:
    trunk = SharedRange(0, 0, 4, (0, 1, 2, 3))
    branches = [SharedRange(0, 4, 100, (0, 1)), SharedRange(2, 4, 100, (2, 3))]
    chosen = choose_ranges([trunk, *branches], decodes(100, 100, 100, 100), COSTS[2])
    assert chosen == [SharedRange(0, 0, 100, (0, 1)), SharedRange(2, 0, 100, (2, 3))]


def test_short_branches_are_left_to_the_suffixes() -> None:
    trunk = SharedRange(0, 0, 100, (0, 1, 2, 3))
    branches = [SharedRange(0, 100, 104, (0, 1)), SharedRange(2, 100, 104, (2, 3))]
    chosen = choose_ranges([trunk, *branches], decodes(104, 104, 104, 104), COSTS[2])
    assert chosen == [trunk]


def test_ranges_that_pay_only_together_are_called_together() -> None:
    ranges = [SharedRange(0, 9 * i, 9 * (i + 1), (0, 1)) for i in range(2)]
    assert choose_ranges(ranges, decodes(20, 20), COSTS[2]) == [SharedRange(0, 0, 18, (0, 1))]


def test_prefills_stay_out_unless_the_cost_lets_them_in() -> None:
    segments = [*decodes(50, 50), Segment(2, 2, 50, 54)]
    ranges = [SharedRange(2, 0, 50, (0, 1, 2))]
    assert choose_ranges(ranges, segments, COSTS[1]) == [SharedRange(0, 0, 50, (0, 1))]
    assert choose_ranges(ranges, segments, AS_PREFILLS_TOO) == [SharedRange(0, 0, 50, (0, 1, 2))]
