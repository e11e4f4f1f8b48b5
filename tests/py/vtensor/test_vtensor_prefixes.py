"""Recorded prefixes: who shares what, who copies, what is pinned and what is evicted first."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from flexinfer.vtensor import VTensorManager
from helpers.manager_kit import CHUNK, PROMPT, checked_manager, filled, open_manager

pytestmark = pytest.mark.usefixtures("kv_device")


@pytest.fixture
def manager() -> Iterator[VTensorManager]:
    yield from checked_manager()


def test_a_recorded_prefix_is_shared_without_a_copy(manager: VTensorManager) -> None:
    first = filled(manager, PROMPT, 3)
    assert first.record_prefix(PROMPT) == 10
    second = manager.create([*PROMPT, 77])
    assert second.num_cached_tokens == 10
    assert (second.k(0) == 3).all()
    assert manager.stats().resident_bytes == 3 * CHUNK


def test_recording_twice_adds_nothing(manager: VTensorManager) -> None:
    vtensor = filled(manager, PROMPT)
    vtensor.record_prefix(PROMPT)
    assert vtensor.record_prefix(PROMPT) == 0
    assert vtensor.record_prefix(PROMPT[:5]) == 0


def test_recording_more_than_there_is_is_a_value_error(manager: VTensorManager) -> None:
    with pytest.raises(ValueError, match="record_prefix of 11 tokens"):
        filled(manager, PROMPT).record_prefix([*PROMPT, 1])


def test_recording_more_than_there_is_is_refused_though_others_recorded_it(
    manager: VTensorManager,
) -> None:
    filled(manager, PROMPT, 3).record_prefix(PROMPT)
    with pytest.raises(ValueError, match="record_prefix of 10 tokens"):
        manager.create().record_prefix(PROMPT)


@pytest.mark.parametrize("by_itself", [0, 1, 4, 8])
def test_what_two_requests_computed_is_kept_once(manager: VTensorManager, by_itself: int) -> None:
    first, second = manager.create(), manager.create()
    for vtensor in (first, second):
        vtensor.extend(10)
        vtensor.k(0)[:] = 3
    second.record_prefix(PROMPT[:by_itself])
    first.record_prefix(PROMPT)
    second.record_prefix(PROMPT)
    assert manager.stats().shared_bytes == 2 * CHUNK
    manager.check_integrity()
    second.release()
    manager.check_integrity()


@pytest.mark.parametrize(
    "tokens",
    [
        PROMPT,
        tuple(PROMPT),
        range(10),
        array("i", PROMPT),
        np.array(PROMPT, dtype=np.int32),
        np.array(PROMPT, dtype=np.int64),
        np.array([0, 9] * 10, dtype=np.int32)[::2] * 0 + np.arange(10, dtype=np.int32),
    ],
)
def test_tokens_may_be_lists_or_buffers(manager: VTensorManager, tokens: Any) -> None:
    filled(manager, PROMPT).record_prefix(tokens)
    assert manager.match_prefix(tokens) == 10


@pytest.mark.parametrize("tokens", [["a"], [2**40], "text", [1.5], [None], np.array([0.5])])
def test_tokens_that_are_no_tokens_are_a_value_error(manager: VTensorManager, tokens: Any) -> None:
    with pytest.raises(ValueError, match="tokens must be integers"):
        manager.create(tokens)


def test_a_matrix_of_tokens_is_a_type_error(manager: VTensorManager) -> None:
    with pytest.raises(TypeError):
        manager.create(np.zeros((2, 2), dtype=np.int32))


def test_the_match_may_be_bounded(manager: VTensorManager) -> None:
    filled(manager, PROMPT).record_prefix(PROMPT)
    assert manager.create(PROMPT, max_cached_tokens=9).num_cached_tokens == 9
    assert manager.create(PROMPT, max_cached_tokens=-1).num_cached_tokens == 0


def test_salts_never_share(manager: VTensorManager) -> None:
    filled(manager, PROMPT, 3, salt="alice").record_prefix(PROMPT)
    assert manager.create(PROMPT, cache_salt="bob").num_cached_tokens == 0
    assert manager.match_prefix(PROMPT) == 0
    assert manager.match_prefix(PROMPT, "alice") == 10


def test_the_next_turn_of_a_chat_copies_nothing(manager: VTensorManager) -> None:
    turn = filled(manager, PROMPT, 3)
    turn.record_prefix(PROMPT)
    turn.release()
    following = manager.create([*PROMPT, 1, 2])
    following.extend(12)
    assert following.num_cached_tokens == 10
    assert manager.stats().chunks_copied == 0


def test_the_second_of_two_writers_gets_a_copy_of_the_tail_chunk(manager: VTensorManager) -> None:
    first = filled(manager, PROMPT, 3)
    first.record_prefix(PROMPT)
    second = manager.create(PROMPT)
    first.extend(11)
    second.extend(11)
    first.k(0)[10] = 8
    second.k(0)[10] = 9
    assert first.k(0)[10].max() == 8
    assert (second.k(0)[:10] == 3).all()
    assert second.info().chunks_copied == 1


def test_a_fork_shows_the_same_and_then_goes_its_own_way(manager: VTensorManager) -> None:
    parent = filled(manager, PROMPT, 3)
    child = parent.fork()
    child.extend(11)
    parent.extend(11)
    child.k(1)[10] = 4
    parent.k(1)[10] = 5
    assert (child.k(1)[:10] == 3).all()
    assert (child.k(1)[10].max(), parent.k(1)[10].max()) == (4, 5)


def test_without_aliasing_prefixes_are_copied() -> None:
    with open_manager(alias=False) as manager:
        filled(manager, PROMPT, 3).record_prefix(PROMPT)
        second = manager.create(PROMPT)
        assert (second.k(0) == 3).all()
        assert manager.stats().shared_bytes == 0
        assert second.fork().info().chunks_copied == 3


def test_a_pinned_prefix_is_not_evicted(manager: VTensorManager) -> None:
    filled(manager, PROMPT).record_prefix(PROMPT)
    assert manager.pin_prefix(PROMPT, "me") == 10
    manager.trim()
    assert manager.evict(64 * CHUNK) == 0
    assert manager.reset_prefix_cache() == 0
    assert manager.unpin_prefix("me") == 1
    assert manager.evict(64 * CHUNK) == 3 * CHUNK


def test_a_pin_ends_with_its_time_to_live(manager: VTensorManager) -> None:
    filled(manager, PROMPT).record_prefix(PROMPT)
    manager.pin_prefix(PROMPT, "me", ttl_s=600)
    manager.trim()
    assert manager.evict(CHUNK) == 0
    manager.unpin_prefix("me")
    manager.pin_prefix(PROMPT, "me", ttl_s=0.05)
    time.sleep(0.06)
    assert manager.evict(CHUNK) == CHUNK


def test_pinning_what_is_not_recorded_pins_nothing(manager: VTensorManager) -> None:
    assert manager.pin_prefix(PROMPT, "me") == 0
    assert manager.unpin_prefix("me") == 0


def test_eviction_takes_the_least_recently_used_first(manager: VTensorManager) -> None:
    filled(manager, [1] * 4).record_prefix([1] * 4)
    filled(manager, [2] * 4).record_prefix([2] * 4)
    manager.match_prefix([1] * 4)
    manager.trim()
    manager.evict(CHUNK)
    assert (manager.match_prefix([1] * 4), manager.match_prefix([2] * 4)) == (4, 0)


def test_evict_refuses_a_negative_size(manager: VTensorManager) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        manager.evict(-1)


# What the snapshot tells.


def generations(manager: VTensorManager) -> dict[int, int]:
    return {chunk.id: chunk.generation for chunk in manager.snapshot().chunks}


def test_a_chunk_that_is_used_again_has_another_generation(manager: VTensorManager) -> None:
    filled(manager, PROMPT).release()  # recorded, or parked with what it held
    manager.drain()
    manager.reset_prefix_cache()
    before = generations(manager)
    other = filled(manager, [token + 100 for token in PROMPT])
    after = generations(manager)
    mapped = {info.id: info.table for info in manager.snapshot().vtensors}[other.id]
    assert mapped
    assert all(after[idx] != before.get(idx) for idx in mapped)


def test_a_chunk_that_is_shared_keeps_its_generation(manager: VTensorManager) -> None:
    first = filled(manager, PROMPT)
    first.record_prefix(PROMPT)
    before = generations(manager)
    manager.create([*PROMPT[:8], 99])
    first.release()
    after = generations(manager)
    recorded = manager.snapshot().prefixes[0].chunks
    assert recorded
    assert all(after[idx] == before[idx] for idx in recorded)


def test_a_recorded_prefix_tells_its_first_tokens(manager: VTensorManager) -> None:
    long = list(range(20))
    filled(manager, long).record_prefix(long)
    branch = [*long[:8], 99, 98]
    filled(manager, branch).record_prefix(branch)
    told = {info.start_tokens: [] for info in manager.snapshot().prefixes}
    for info in manager.snapshot().prefixes:
        told[info.start_tokens].append(info.first_tokens)
    assert told[0] == [long[:8]]
    assert sorted(told[8]) == [long[8:], [99, 98]]
    other = list(range(200, 220))
    filled(manager, other).record_prefix(other)
    assert other[:16] in [info.first_tokens for info in manager.snapshot().prefixes]
