"""``flexinfer.vtensor``: what vTensors and managers do from first to last, and what misuse says."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from flexinfer.errors import OutOfMemoryError, ReleasedError
from flexinfer.vtensor import VTensorManager
from helpers.manager_kit import CHUNK, PROMPT, checked_manager, filled, open_manager

pytestmark = pytest.mark.usefixtures("kv_device")


@pytest.fixture
def manager() -> Iterator[VTensorManager]:
    yield from checked_manager()


# From create to release.


def test_an_extended_vtensor_keeps_what_is_written(manager: VTensorManager) -> None:
    vtensor = filled(manager, PROMPT)
    vtensor.k(1)[3] = 7
    assert (vtensor.num_tokens, vtensor.mapped_tokens) == (10, 12)
    assert vtensor.k(1)[3].min() == 7
    assert vtensor.k(0)[3].max() == 1


def test_num_tokens_never_falls_by_extend(manager: VTensorManager) -> None:
    vtensor = filled(manager, PROMPT)
    vtensor.extend(3)
    assert vtensor.num_tokens == 10


def test_truncate_gives_up_the_last_tokens(manager: VTensorManager) -> None:
    vtensor = filled(manager, PROMPT)
    vtensor.truncate(4)
    assert vtensor.num_tokens == 4
    assert vtensor.k(0).shape[0] == 4


def test_truncate_to_more_than_there_is_is_a_value_error(manager: VTensorManager) -> None:
    with pytest.raises(ValueError, match="truncate to 11 tokens"):
        filled(manager, PROMPT).truncate(11)


@pytest.mark.parametrize("method", ["extend", "try_extend", "truncate"])
def test_a_negative_length_is_a_value_error(manager: VTensorManager, method: str) -> None:
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        getattr(filled(manager, PROMPT), method)(-1)


@pytest.mark.parametrize("method", ["extend", "try_extend", "pre_extend"])
@pytest.mark.parametrize("length", [-1, 2**70, None])
def test_a_batch_with_a_bad_length_is_a_value_error(
    manager: VTensorManager, method: str, length: Any
) -> None:
    vtensor = manager.create()
    with pytest.raises(ValueError, match="num_tokens must be integers"):
        getattr(manager, method)([vtensor], [length])


@pytest.mark.parametrize("method", ["extend", "try_extend", "pre_extend"])
def test_a_batch_needs_one_length_each(manager: VTensorManager, method: str) -> None:
    vtensor = manager.create()
    with pytest.raises(ValueError, match="1 vTensors but 2 lengths"):
        getattr(manager, method)([vtensor], [1, 2])


def test_a_vtensor_stands_in_a_batch_once(manager: VTensorManager) -> None:
    vtensor = manager.create()
    with pytest.raises(ValueError, match="stands twice"):
        manager.try_extend([vtensor, vtensor], [1, 2])


@pytest.mark.parametrize("method", ["extend", "try_extend", "pre_extend"])
def test_a_vtensor_of_another_manager_is_a_lookup_error(
    manager: VTensorManager, method: str
) -> None:
    manager.create()
    with open_manager() as other, pytest.raises(LookupError, match="belongs to another manager"):
        getattr(manager, method)([other.create()], [4])


def test_more_than_max_seq_len_is_a_value_error(manager: VTensorManager) -> None:
    with pytest.raises(ValueError, match="beyond max_seq_len 64"):
        manager.create().extend(65)
    with pytest.raises(ValueError, match="longer than max_seq_len 64"):
        manager.create([0] * 65)


def test_release_frees_the_slot(manager: VTensorManager) -> None:
    vtensors = [manager.create() for _ in range(4)]
    assert manager.try_create() is None
    vtensors[2].release()
    assert manager.num_free_slots == 1
    assert manager.create().slot == vtensors[2].slot


def test_no_slot_is_an_out_of_memory_error_with_sizes(manager: VTensorManager) -> None:
    vtensors = [manager.create() for _ in range(4)]
    manager.drain()  # a chunk that the worker cleans is not free
    with pytest.raises(OutOfMemoryError, match="all 4 slots") as caught:
        vtensors[0].fork()
    assert caught.value.budget_bytes == manager.memory_budget
    assert caught.value.free_bytes == manager.available_bytes


def test_a_second_release_is_a_released_error(manager: VTensorManager) -> None:
    vtensor = manager.create()
    vtensor.release()
    with pytest.raises(ReleasedError, match="has been released"):
        vtensor.release()


@pytest.mark.parametrize(
    "use",
    [
        lambda v: v.extend(1),
        lambda v: v.try_extend(1),
        lambda v: v.truncate(0),
        lambda v: v.record_prefix([]),
        lambda v: v.fork(),
        lambda v: v.k(0),
        lambda v: v.v(0),
        lambda v: v.info(),
        lambda v: v.num_tokens,
        lambda v: v._manager.try_extend([v], [1]),
    ],
)
def test_use_after_release_is_a_released_error(manager: VTensorManager, use: Any) -> None:
    vtensor = manager.create()
    vtensor.release()
    manager.create()  # lives in the same slot
    with pytest.raises(ReleasedError):
        use(vtensor)
    assert "released" in repr(vtensor)


def test_pre_extend_passes_over_released_vtensors(manager: VTensorManager) -> None:
    vtensor = manager.create()
    vtensor.release()
    manager.pre_extend([vtensor], [8])
    manager.drain()


def test_an_id_that_was_never_given_out_is_a_lookup_error(manager: VTensorManager) -> None:
    for vtensor_id in (0, 4 * 1000, 2**63):
        with pytest.raises(LookupError, match="no vTensor has id"):
            manager._core.extend([vtensor_id], [1])


def test_a_collected_vtensor_is_released(manager: VTensorManager) -> None:
    filled(manager, PROMPT)
    gc.collect()
    assert manager.stats().num_vtensors == 0


def test_pre_extension_maps_in_the_background(manager: VTensorManager) -> None:
    vtensor = filled(manager, PROMPT)
    manager.pre_extend([vtensor], [20])
    manager.drain()
    assert (vtensor.num_tokens, vtensor.mapped_tokens) == (10, 20)
    assert manager.stats().map_us_hidden > 0


def test_without_pre_extension_nothing_happens_ahead() -> None:
    with open_manager(pre_extend=False) as manager:
        vtensor = manager.create()
        manager.pre_extend([vtensor], [20])
        manager.drain()
        assert vtensor.mapped_tokens == 0


# Closing the manager.


@pytest.mark.parametrize(
    "use",
    [
        lambda m: m.create(),
        lambda m: m.try_extend([], []),
        lambda m: m.match_prefix([1]),
        lambda m: m.trim(),
        lambda m: m.evict(1),
        lambda m: m.k(0),
        lambda m: m.memory_budget,
        lambda m: m.snapshot(),
        lambda m: m.check_integrity(),
    ],
)
def test_use_after_close_is_a_released_error(use: Any) -> None:
    manager = open_manager()
    manager.close()
    with pytest.raises(ReleasedError, match="closed"):
        use(manager)


def test_close_gives_all_memory_back_and_may_be_repeated() -> None:
    manager = open_manager()
    filled(manager, PROMPT).record_prefix(PROMPT)
    live = filled(manager, [9] * 9)
    manager.pin_prefix(PROMPT, "me")
    manager.close()
    manager.close()
    assert live.released
    assert "released" in repr(live)
    assert manager.stats().resident_bytes == 0


def test_close_with_living_views_keeps_their_memory_only() -> None:
    manager = open_manager()
    vtensor = filled(manager, PROMPT, 5)
    view = vtensor.k(0)
    manager.close()
    assert manager.stats().resident_bytes == 3 * CHUNK
    assert (view == 5).all()
    del view
    gc.collect()
    assert manager.stats().resident_bytes == 0


def test_a_view_outlives_its_manager() -> None:
    manager = open_manager()
    vtensor = filled(manager, PROMPT, 5)
    view = vtensor.k(0)
    del vtensor, manager
    gc.collect()
    assert (view == 5).all()
    view[:] = 6


def test_the_context_manager_closes() -> None:
    with open_manager() as manager:
        pass
    assert manager.closed
