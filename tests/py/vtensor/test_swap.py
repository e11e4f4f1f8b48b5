"""Swap, sleep and dedup as Python sees them: contents, addresses, errors and numbers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexinfer.errors import DriverError, OutOfMemoryError, ReleasedError
from flexinfer.vtensor import KVSpec, VTensor, VTensorManager
from helpers import device_param as kv_device

pytestmark = pytest.mark.usefixtures("kv_device")

CHUNK = 4096
TOKEN_BYTES = 1024  # 2 layers x 2 x 2 heads x 32 dims x 4 bytes: four tokens per chunk
SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=32, max_seq_len=64)
PROMPT = list(range(10))  # two whole chunks and a half


def open_manager(**options: Any) -> VTensorManager:
    defaults: dict[str, Any] = {"memory_budget": 64 * CHUNK, "swap_space": 64 * CHUNK}
    options = {**defaults, "max_requests": 4, **kv_device.options(), **options}
    return VTensorManager(SPEC, chunk_bytes=CHUNK, **options)


@pytest.fixture
def manager() -> Iterator[VTensorManager]:
    with open_manager() as manager:
        yield manager
        if not manager.closed:
            manager.check_integrity()


def filled(manager: VTensorManager, tokens: list[int], value: float = 1) -> VTensor:
    """A vTensor whose token ``t`` shows ``value + t`` in the K and V that it had to compute."""
    vtensor = manager.create(tokens)
    vtensor.extend(len(tokens))
    fresh = slice(vtensor.num_cached_tokens, len(tokens))
    numbers = value + np.arange(len(tokens), dtype=np.float32)[fresh, None, None]
    for layer in range(SPEC.num_layers):
        vtensor.k(layer)[fresh] = numbers
        vtensor.v(layer)[fresh] = -numbers
    return vtensor


def shows(vtensor: VTensor, value: float) -> bool:
    expected = value + np.arange(vtensor.num_tokens, dtype=np.float32)[:, None, None]
    return all(
        bool((vtensor.k(layer) == expected).all() and (vtensor.v(layer) == -expected).all())
        for layer in range(SPEC.num_layers)
    )


# --------------------------------------------------------------------------------------------- swap


@pytest.mark.parametrize("to_file", [False, True])
def test_swapped_contents_come_back_to_the_same_addresses(to_file: bool, tmp_path: Path) -> None:
    with open_manager(swap_directory=str(tmp_path) if to_file else None) as manager:
        vtensor = filled(manager, PROMPT)
        address = vtensor.k(0).ctypes.data
        assert vtensor.try_swap_out()
        filled(manager, list(range(50, 90)), value=7)  # takes the chunks
        assert vtensor.try_swap_in()
        assert shows(vtensor, 1)
        assert vtensor.k(0).ctypes.data == address


def test_a_swapped_vtensor_goes_on_where_it_stopped(manager: VTensorManager) -> None:
    vtensor = filled(manager, PROMPT)
    assert vtensor.try_swap_out()
    assert vtensor.num_tokens == 10
    assert vtensor.try_swap_in()
    vtensor.extend(20)
    vtensor.k(0)[10:] = 5
    assert (vtensor.k(0)[:10, 0, 0] == 1 + np.arange(10)).all()


def test_swap_is_counted(manager: VTensorManager) -> None:
    vtensor = filled(manager, PROMPT)
    vtensor.try_swap_out()
    stats = manager.stats()
    assert stats.swapped_bytes == 10 * TOKEN_BYTES
    assert (stats.chunks_swapped_out, stats.chunks_swapped_in) == (3, 0)
    vtensor.try_swap_in()
    stats = manager.stats()
    assert (stats.swapped_bytes, stats.chunks_swapped_in) == (0, 3)


def test_recorded_chunks_are_shared_when_it_comes_back(manager: VTensorManager) -> None:
    vtensor = filled(manager, PROMPT)
    vtensor.record_prefix(PROMPT)
    vtensor.try_swap_out()
    assert vtensor.try_swap_in(PROMPT)
    assert manager.stats().chunks_swapped_in == 0  # they were kept, the tail too
    assert shows(vtensor, 1)


def test_32_who_share_a_prompt_write_it_once_and_only_when_somebody_needs_the_memory() -> None:
    prompt = list(range(48))  # 12 chunks
    with open_manager(max_requests=37, swap_space=128 * CHUNK) as manager:
        filled(manager, prompt).record_prefix(prompt)
        sharers = [manager.create(prompt) for _ in range(32)]
        for index, sharer in enumerate(sharers):
            sharer.extend(49)
            sharer.k(0)[48] = index
        assert all(sharer.try_swap_out() for sharer in sharers)
        assert manager.available_bytes == 64 * CHUNK
        strangers = [manager.create() for _ in range(4)]
        for stranger in strangers[:3]:
            stranger.extend(64)
        assert manager.stats().swapped_bytes == 32 * TOKEN_BYTES
        strangers[3].extend(64)
        assert manager.stats().swapped_bytes == (32 + 48) * TOKEN_BYTES
        manager.check_integrity()
        for stranger in strangers:
            stranger.release()
        for index, sharer in enumerate(sharers):
            assert sharer.try_swap_in()
            assert (sharer.k(0)[:48, 0, 0] == 1 + np.arange(48)).all()
            assert sharer.k(0)[48, 0, 0] == index
            sharer.release()


def test_without_swap_space_nothing_is_swapped() -> None:
    with open_manager(swap_space=0) as manager:
        vtensor = filled(manager, PROMPT)
        assert not vtensor.try_swap_out()
        assert shows(vtensor, 1)


def test_swap_in_without_memory_is_false_and_may_be_repeated() -> None:
    with open_manager(memory_budget=8 * CHUNK) as manager:
        vtensor = filled(manager, PROMPT)
        assert vtensor.try_swap_out()
        other = filled(manager, list(range(100, 128)), value=7)
        assert not vtensor.try_swap_in()
        other.release()
        assert vtensor.try_swap_in()
        assert shows(vtensor, 1)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda vtensor: vtensor.extend(12),
        lambda vtensor: vtensor.try_extend(1),
        lambda vtensor: vtensor.truncate(2),
        lambda vtensor: vtensor.fork(),
        lambda vtensor: vtensor.record_prefix(PROMPT),
        lambda vtensor: vtensor.k(0),
        lambda vtensor: vtensor.try_swap_out(),
    ],
)
def test_a_swapped_vtensor_refuses_what_needs_its_memory(
    manager: VTensorManager, misuse: Callable[[VTensor], Any]
) -> None:
    vtensor = filled(manager, PROMPT)
    vtensor.try_swap_out()
    with pytest.raises(ValueError, match="swap it in first"):
        misuse(vtensor)
    assert vtensor.try_swap_in()
    assert shows(vtensor, 1)


def test_swap_in_of_what_is_resident_is_a_value_error(manager: VTensorManager) -> None:
    with pytest.raises(ValueError, match="not swapped out"):
        filled(manager, PROMPT).try_swap_in()


def test_living_views_keep_a_vtensor_from_being_swapped_out(manager: VTensorManager) -> None:
    vtensor = filled(manager, PROMPT)
    view = vtensor.k(1)
    with pytest.raises(ValueError, match="views"):
        vtensor.try_swap_out()
    assert view[3, 0, 0] == 4
    del view
    assert vtensor.try_swap_out()


def test_release_and_close_free_the_swap_space() -> None:
    manager = open_manager()
    first, second = filled(manager, PROMPT), filled(manager, PROMPT)
    first.try_swap_out()
    second.try_swap_out()
    first.release()
    assert manager.stats().swapped_bytes == 10 * TOKEN_BYTES
    manager.close()
    assert manager.stats().swapped_bytes == 0


# -------------------------------------------------------------------------------------------- sleep


@pytest.mark.parametrize("to_file", [False, True])
def test_sleep_gives_all_memory_back_and_wake_restores_it(to_file: bool, tmp_path: Path) -> None:
    with open_manager() as manager:
        vtensor = filled(manager, PROMPT)
        vtensor.record_prefix(PROMPT)
        swapped = filled(manager, [90, 91], value=3)
        swapped.try_swap_out()
        arena = manager.k(1)
        assert manager.resident_bytes == 4 * CHUNK  # three in use, one free since the swap
        num_bytes = manager.sleep(str(tmp_path) if to_file else None)
        same_memory = not to_file and kv_device.current() == "cpu"
        assert num_bytes == 4 * CHUNK - same_memory * 10 * TOKEN_BYTES
        assert manager.resident_bytes == 0
        assert list(tmp_path.iterdir()) == []  # unlinked
        manager.wake()
        assert shows(vtensor, 1)
        assert manager.match_prefix(PROMPT) == 10
        assert (arena[vtensor.slot, :10, 0, 0] == 1 + np.arange(10)).all()
        assert swapped.try_swap_in()
        assert shows(swapped, 3)


def test_what_was_shared_is_still_shared_after_wake(manager: VTensorManager) -> None:
    vtensor = filled(manager, PROMPT)
    vtensor.record_prefix(PROMPT)
    child = vtensor.fork()
    before = manager.stats()
    manager.sleep()
    manager.wake()
    after = manager.stats()
    assert (after.saved_bytes, after.resident_bytes) == (before.saved_bytes, before.resident_bytes)
    child.extend(11)
    child.k(0)[10:] = 9
    assert shows(vtensor, 1)


def test_sleep_is_counted_once(manager: VTensorManager) -> None:
    filled_vtensor = filled(manager, PROMPT)
    manager.sleep()
    stats = manager.stats()
    assert manager.asleep
    assert (stats.resident_bytes, stats.asleep_bytes) == (0, 10 * TOKEN_BYTES)
    manager.wake()
    manager.wake()  # does nothing
    assert manager.stats().asleep_bytes == 0
    assert filled_vtensor.num_tokens == 10


@pytest.mark.parametrize(
    "misuse",
    [
        lambda manager, vtensor: manager.create(),
        lambda manager, vtensor: vtensor.extend(12),
        lambda manager, vtensor: vtensor.try_swap_out(),
        lambda manager, vtensor: vtensor.k(0),
        lambda manager, vtensor: manager.k(0),
        lambda manager, vtensor: manager.pre_extend([vtensor], [20]),
        lambda manager, vtensor: manager.match_prefix(PROMPT),
        lambda manager, vtensor: manager.trim(),
        lambda manager, vtensor: manager.sleep(),
    ],
)
def test_while_asleep_everything_else_is_a_value_error(
    manager: VTensorManager, misuse: Callable[[VTensorManager, VTensor], Any]
) -> None:
    vtensor = filled(manager, PROMPT)
    manager.sleep()
    with pytest.raises(ValueError, match="asleep"):
        misuse(manager, vtensor)
    manager.check_integrity()
    manager.wake()
    assert shows(vtensor, 1)


def test_what_is_released_while_asleep_gives_its_slot_back_at_wake(manager: VTensorManager) -> None:
    vtensor = filled(manager, PROMPT)
    manager.sleep()
    vtensor.release()
    with pytest.raises(ReleasedError):
        vtensor.release()
    assert manager.num_free_slots == 3
    manager.wake()
    assert manager.num_free_slots == 4


def test_a_vtensor_dropped_while_asleep_gives_its_slot_back_at_wake(
    manager: VTensorManager,
) -> None:
    vtensors = [filled(manager, PROMPT) for _ in range(4)]
    manager.sleep()
    del vtensors
    gc.collect()
    manager.wake()
    assert manager.num_free_slots == 4
    assert all(manager.try_create() is not None for _ in range(4))


def test_living_views_keep_the_manager_awake(manager: VTensorManager) -> None:
    vtensor = filled(manager, PROMPT)
    view = vtensor.k(0)
    with pytest.raises(ValueError, match="1 tensor views"):
        manager.sleep()
    assert not manager.asleep
    assert view[0, 0, 0] == 1


def test_sleep_between_the_two_ends_of_a_step_is_a_value_error(manager: VTensorManager) -> None:
    vtensor = filled(manager, PROMPT)
    manager.begin_step()
    with pytest.raises(ValueError, match="end_step"):
        manager.sleep()
    manager.end_step()
    assert shows(vtensor, 1)


def test_a_directory_that_does_not_exist_leaves_the_manager_awake(manager: VTensorManager) -> None:
    vtensor = filled(manager, PROMPT)
    with pytest.raises(DriverError, match="mkostemp"):
        manager.sleep("/no/such/directory")
    assert not manager.asleep
    assert shows(vtensor, 1)


def test_a_manager_may_be_closed_asleep() -> None:
    manager = open_manager()
    filled(manager, PROMPT).try_swap_out()
    filled(manager, PROMPT).record_prefix(PROMPT)
    manager.sleep()
    manager.close()
    stats = manager.stats()
    assert (stats.resident_bytes, stats.swapped_bytes, stats.asleep_bytes) == (0, 0, 0)


def test_wake_without_memory_is_an_error_and_may_be_repeated() -> None:
    from vtensor.test_faults import open_manager as open_faulty

    with open_faulty() as manager:
        vtensor = manager.create(PROMPT)
        vtensor.extend(10)
        vtensor.k(0)[:] = 6
        manager.sleep()
        manager.faults.fail(3, out_of_memory=True)
        with pytest.raises(OutOfMemoryError):
            manager.wake()
        assert manager.asleep
        assert manager.resident_bytes == 0
        manager.wake()
        assert (vtensor.k(0) == 6).all()


# -------------------------------------------------------------------------------------------- dedup


@pytest.mark.parametrize(("dedup", "num_chunks"), [(True, 2), (False, 0)])
def test_a_prefix_computed_twice_is_held_once(dedup: bool, num_chunks: int) -> None:
    with open_manager(dedup=dedup) as manager:
        vtensors = [manager.create(PROMPT), manager.create(PROMPT)]
        for vtensor in vtensors:
            vtensor.extend(10)
            vtensor.k(0)[:] = 4
            vtensor.record_prefix(PROMPT)
        stats = manager.stats()
        assert stats.chunks_deduplicated == num_chunks
        assert stats.saved_bytes == num_chunks * CHUNK
        assert all((vtensor.k(0) == 4).all() for vtensor in vtensors)


def test_a_driver_that_fails_during_dedup_does_not_fail_the_recording() -> None:
    from vtensor.test_faults import open_manager as open_faulty

    tokens = list(range(16))
    with open_faulty() as manager:
        vtensors = [manager.create(tokens), manager.create(tokens)]
        for vtensor in vtensors:
            vtensor.extend(16)
            vtensor.k(0)[:] = 4
        vtensors[0].record_prefix(tokens)
        manager.faults.fail(1)
        assert vtensors[1].record_prefix(tokens) == 0
        stats = manager.stats()
        assert (stats.dedup_failures, stats.chunks_deduplicated) == (1, 0)
        vtensors[1].record_prefix(tokens)
        assert manager.stats().chunks_deduplicated > 0
        assert all((vtensor.k(0) == 4).all() for vtensor in vtensors)


def test_without_aliasing_nothing_is_deduplicated() -> None:
    with open_manager(alias=False) as manager:
        vtensors = [manager.create(PROMPT), manager.create(PROMPT)]
        for vtensor in vtensors:
            vtensor.extend(10)
            vtensor.record_prefix(PROMPT)
        assert manager.stats().saved_bytes == 0
