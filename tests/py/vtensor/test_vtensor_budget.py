"""A manager's budget: shortage, exhaustion, and the numbers that tell where memory is."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from flexinfer.errors import OutOfMemoryError, VTensorError
from flexinfer.vtensor import VTensorManager
from helpers.manager_kit import CHUNK, PROMPT, checked_manager, filled

pytestmark = pytest.mark.usefixtures("kv_device")


@pytest.fixture
def manager() -> Iterator[VTensorManager]:
    yield from checked_manager()


def test_shortage_is_false_and_changes_nothing(manager: VTensorManager) -> None:
    manager.memory_budget = 3 * CHUNK
    vtensor = filled(manager, PROMPT, 2)
    assert not vtensor.try_extend(13)
    assert vtensor.num_tokens == 10
    assert (vtensor.k(0) == 2).all()


def test_exhaustion_tells_bytes_asked_free_and_budget(manager: VTensorManager) -> None:
    manager.memory_budget = 3 * CHUNK
    vtensor = filled(manager, PROMPT)
    with pytest.raises(OutOfMemoryError) as caught:
        vtensor.extend(20)
    error = caught.value
    assert isinstance(error, MemoryError)
    assert isinstance(error, VTensorError)
    assert (error.asked_bytes, error.free_bytes, error.budget_bytes) == (2 * CHUNK, 0, 3 * CHUNK)


def test_shortage_takes_memory_from_recorded_prefixes(manager: VTensorManager) -> None:
    manager.memory_budget = 4 * CHUNK
    filled(manager, PROMPT).record_prefix(PROMPT)
    gc.collect()
    manager.create([99]).extend(16)
    assert manager.match_prefix(PROMPT) == 0


def test_the_budget_falls_by_evicting_and_trimming(manager: VTensorManager) -> None:
    filled(manager, PROMPT).record_prefix(PROMPT)
    manager.memory_budget = 2 * CHUNK
    stats = manager.stats()
    assert (stats.budget_bytes, stats.resident_bytes) == (2 * CHUNK, 2 * CHUNK)


def test_a_budget_below_what_is_in_use_is_refused(manager: VTensorManager) -> None:
    vtensor = filled(manager, PROMPT)
    with pytest.raises(OutOfMemoryError, match="in use"):
        manager.memory_budget = 2 * CHUNK
    assert manager.memory_budget == 64 * CHUNK
    assert vtensor.num_tokens == 10


@pytest.mark.parametrize("budget", [0, -1, CHUNK - 1, "no", 2**63, 2**70])
def test_a_budget_that_makes_no_sense_is_a_value_error(
    manager: VTensorManager, budget: Any
) -> None:
    with pytest.raises(ValueError, match="memory_budget"):
        manager.memory_budget = budget


def test_bytes_for_counts_whole_chunks(manager: VTensorManager) -> None:
    assert [manager.bytes_for(n) for n in (0, 1, 4, 5)] == [0, CHUNK, CHUNK, 2 * CHUNK]


def test_the_four_kinds_of_bytes_are_told_apart(manager: VTensorManager) -> None:
    filled_one = filled(manager, PROMPT)
    filled_one.record_prefix(PROMPT)
    second = manager.create(PROMPT)
    stats = manager.stats()
    assert stats.reserved_bytes == 4 * 16 * CHUNK
    assert stats.mapped_bytes == 6 * CHUNK
    assert stats.resident_bytes == stats.shared_bytes == stats.saved_bytes == 3 * CHUNK
    assert stats.as_dict()["driver_calls"]["create"]["calls"] == 3
    assert second.slot != filled_one.slot


def test_the_snapshot_names_chunks_sharers_and_prefixes(manager: VTensorManager) -> None:
    first = filled(manager, PROMPT)
    first.record_prefix(PROMPT)
    second = manager.create(PROMPT)
    manager.pin_prefix(PROMPT, "me")
    snapshot = manager.snapshot()
    assert [len(v.table) for v in snapshot.vtensors] == [3, 3]
    assert {chunk.refs for chunk in snapshot.chunks} == {3}
    assert all(chunk.sharers == [first.id, second.id] for chunk in snapshot.chunks)
    assert [(p.num_tokens, p.pinned_by) for p in snapshot.prefixes] == [(10, ["me"])]


def test_the_snapshot_tells_which_prefix_each_one_continues(manager: VTensorManager) -> None:
    for tail in ([], [70, 71], [80, 81, 82]):
        tokens = [*PROMPT, *tail]
        filled(manager, tokens).record_prefix(tokens)
    prefixes = manager.snapshot().prefixes
    assert sorted((p.parent, p.start_tokens, p.num_tokens) for p in prefixes) == [
        (-1, 0, 10),
        (0, 10, 2),
        (0, 10, 3),
    ]
