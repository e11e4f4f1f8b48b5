"""Tensor views of KV: what they show, for how long, and never of whom."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from flexinfer.vtensor import VTensorManager
from helpers import device_param as kv_device
from helpers.manager_kit import CHUNK, PROMPT, checked_manager, filled, open_manager, spec_of

pytestmark = pytest.mark.usefixtures("kv_device")


@pytest.fixture
def manager() -> Iterator[VTensorManager]:
    yield from checked_manager()


# What they show, and for how long.


@pytest.mark.parametrize("layers_per_plane", [1, 2, 4])
def test_every_layer_has_a_place_of_its_own(layers_per_plane: int) -> None:
    with open_manager(spec_of(num_layers=4, layers_per_plane=layers_per_plane)) as manager:
        vtensor = manager.create()
        vtensor.extend(9)
        for layer in range(4):
            vtensor.k(layer)[:] = 10 + layer
            vtensor.v(layer)[:] = 20 + layer
        for layer in range(4):
            assert (vtensor.k(layer) == 10 + layer).all()
            assert (vtensor.v(layer) == 20 + layer).all()


def test_the_arena_and_the_vtensor_show_the_same_memory(manager: VTensorManager) -> None:
    filled(manager, [8]).record_prefix([8])
    vtensor = filled(manager, PROMPT)
    manager.k(1)[vtensor.slot, 3:5] = 42
    assert (vtensor.k(1)[3:5] == 42).all()
    assert manager.v(0).shape == (4, 64, 2, 32)


@kv_device.cpu_only
def test_the_unmapped_tail_reads_as_zeros(manager: VTensorManager) -> None:
    vtensor = filled(manager, PROMPT)
    assert not manager.k(0)[vtensor.slot, 10:].any()
    assert not manager.v(1)[vtensor.slot ^ 1].any()


@pytest.mark.parametrize("layer", [2, -1, 10**6])
def test_a_wrong_layer_is_a_lookup_error(manager: VTensorManager, layer: int) -> None:
    with pytest.raises(LookupError, match="layer"):
        manager.create().k(layer)
    with pytest.raises(LookupError, match="layer"):
        manager.v(layer)


def test_a_view_of_nothing_is_empty(manager: VTensorManager) -> None:
    assert manager.create().k(0).shape == (0, 2, 32)


def test_a_view_keeps_its_data_after_release(manager: VTensorManager) -> None:
    vtensor = filled(manager, PROMPT, 5)
    view = vtensor.k(0)
    vtensor.release()
    assert manager.stats().held_bytes == 3 * CHUNK
    for value in range(20):
        filled(manager, [value] * 12, 9)
    assert (view == 5).all()


def test_the_slot_of_a_held_view_is_used_again_when_the_view_dies(manager: VTensorManager) -> None:
    vtensor = filled(manager, PROMPT)
    view = vtensor.k(0)
    vtensor.release()
    assert manager.num_free_slots == 3
    del view
    assert manager.num_free_slots == 4
    assert manager.stats().held_bytes == 0


def test_a_view_that_was_truncated_away_never_shows_a_newcomer(manager: VTensorManager) -> None:
    vtensor = filled(manager, PROMPT, 5)
    view = vtensor.k(0)
    vtensor.truncate(9)
    vtensor.record_prefix(PROMPT[:9])
    vtensor.release()
    newcomer = manager.create([*PROMPT[:9], 99])
    newcomer.extend(10)
    newcomer.k(0)[9] = 66
    assert (view == 5).all()


def test_truncating_shared_rows_under_a_living_view_is_refused(manager: VTensorManager) -> None:
    vtensor = filled(manager, PROMPT)
    vtensor.record_prefix(PROMPT)
    view = vtensor.k(0)
    with pytest.raises(ValueError, match="views of the vTensor are alive"):
        vtensor.truncate(2)
    del view
    vtensor.truncate(2)


def test_memory_under_a_living_view_is_not_reclaimed() -> None:
    with open_manager(memory_budget=4 * CHUNK, unmapped="guard") as manager:
        vtensor = filled(manager, PROMPT, 5)
        view = vtensor.k(0)
        vtensor.truncate(0)
        assert not manager.create().try_extend(16)
        assert (view == 5).all()


@kv_device.cpu_only
def test_what_is_written_through_a_view_reaches_no_recorded_chunk(manager: VTensorManager) -> None:
    first = filled(manager, PROMPT, 1)
    first.record_prefix(PROMPT)
    second = manager.create()
    second.extend(10)
    view = second.k(0)
    view[:] = 2
    second.record_prefix(PROMPT)  # the same tokens: while a view lives, they are not deduplicated
    assert (view == 2).all()
    for writer in (view, first.k(0), manager.create(PROMPT).k(0)):
        writer[:] = 9
    assert (manager.create(PROMPT).k(0) == 1).all()


# Scrubbing.


def first_bytes_after_reuse(manager: VTensorManager, salt: str) -> Any:
    filled(manager, [1] * 8, 5).release()
    newcomer = manager.create([2] * 8, cache_salt=salt)
    newcomer.extend(8)
    return newcomer.k(0).copy()


@pytest.mark.parametrize("park", [True, False])
@pytest.mark.parametrize(
    ("scrub", "salt", "clean"),
    [
        ("owner", "", True),
        ("owner", "other", True),
        ("tenant", "", False),
        ("tenant", "other", True),
        ("off", "other", False),
    ],
)
def test_memory_that_changes_hands_is_scrubbed(
    scrub: str, salt: str, clean: bool, park: bool
) -> None:
    with open_manager(scrub=scrub, park=park) as manager:
        assert bool(first_bytes_after_reuse(manager, salt).any()) != clean


def test_what_truncation_gives_up_is_scrubbed(manager: VTensorManager) -> None:
    """A truncated vTensor's rows go to the next one, from a record or for want of memory."""
    victim = filled(manager, [1] * 8, 5)
    victim.record_prefix([1] * 8)
    victim.truncate(0)
    manager.reset_prefix_cache()
    stranger = manager.create(cache_salt="stranger")
    stranger.extend(16)
    assert not stranger.k(0).any()


def test_reclaimed_surplus_is_scrubbed() -> None:
    with open_manager(memory_budget=4 * CHUNK) as manager:
        victim = filled(manager, [1] * 12, 5)
        victim.truncate(1)
        stranger = manager.create(cache_salt="stranger")
        stranger.extend(12)
        assert not stranger.k(0).any()
        assert (victim.k(0) == 5).all()


def test_a_copied_prefix_shows_nothing_beyond_itself() -> None:
    with open_manager(alias=False) as manager:
        first = filled(manager, PROMPT, 5)
        first.record_prefix(PROMPT[:9])
        second = manager.create(PROMPT[:9])
        second.extend(12)
        assert not second.k(0)[9:].any()


# As torch tensors.


@kv_device.cpu_only
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_torch_views_are_zero_copy_in_every_dtype(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    with open_manager(spec_of(dtype=getattr(torch, dtype)), from_dlpack=None) as manager:
        vtensor = manager.create()
        vtensor.extend(5)
        first, second = vtensor.k(1), vtensor.k(1)
        assert first.dtype == getattr(torch, dtype)
        assert first.data_ptr() == second.data_ptr()
        first[2] = 1.5
        assert second[2].eq(1.5).all()
        assert manager.k(1)[vtensor.slot].data_ptr() == first.data_ptr()
