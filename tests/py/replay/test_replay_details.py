"""Replays where operations interact: forks that outlive their parent, swaps that are short."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexinfer.replay.replay import replay
from helpers.random_trace import open_manager


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.trace"


def test_the_fork_that_shares_most_counts_a_released_parents_tokens(path: Path) -> None:
    """So that nothing is called waste: each token of the longer fork is there once."""
    with open_manager(memory_budget="4MiB", park=False, pre_extend=False) as manager:
        manager.start_trace(path)
        parent = manager.create()
        parent.extend(64)
        short, long = parent.fork(), parent.fork()
        short.truncate(16)
        parent.release()
        long.extend(80)  # the peak
    assert replay(path).waste_at_peak_bytes == 0


def test_a_swap_in_that_was_short_is_told_from_one_that_still_is(path: Path) -> None:
    with open_manager(pre_extend=False) as manager:
        manager.start_trace(path)
        swapped, other = manager.create(), manager.create()
        swapped.extend(40)
        assert swapped.try_swap_out()
        other.extend(60)
        assert not swapped.try_swap_in(list(range(40)))
    same, more = replay(path), replay(path, memory_budget="8MiB")
    assert (same.num_shortages_avoided, same.replayed.num_shortages) == (0, 1)
    assert (more.num_shortages_avoided, more.replayed.num_shortages) == (1, 0)
