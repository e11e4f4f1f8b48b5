"""Settings that exclude each other, sizes beyond 64 bits, and labels refused."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from flexinfer.vtensor import KVSpec, VTensorManager

SPEC = KVSpec(num_layers=1, num_kv_heads=1, head_dim=128, dtype="float32", max_seq_len=64)


def open_manager(**options: object) -> VTensorManager:
    return VTensorManager(SPEC, "sim", chunk_bytes=4096, memory_budget=1 << 20, **options)  # type: ignore[arg-type]


def ends(call: Callable[[], object]) -> bool:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(20)
    return not thread.is_alive()


@pytest.mark.parametrize("name", ["drain", "trim", "sleep"])
def test_equal_watermarks_that_are_no_whole_chunks_keep_nobody_waiting(name: str) -> None:
    manager = open_manager(min_free_bytes=5000, max_free_bytes=5000)
    vtensor = manager.create()
    manager.pre_extend([vtensor], [8])
    assert ends(getattr(manager, name))
    manager.close()


def test_what_is_kept_ready_is_filled_up_when_steps_are_over() -> None:
    with open_manager(min_free_bytes=8 * 4096) as manager:
        manager.set_busy(True)
        manager.pre_extend([], [])
        manager.drain()
        assert manager.stats().resident_bytes == 2 * 4096
        manager.set_busy(False)
        manager.drain()
        assert manager.stats().resident_bytes == 8 * 4096


def test_a_low_watermark_above_the_high_one_is_refused() -> None:
    with pytest.raises(ValueError, match="min_free_bytes 8192 is more than max_free_bytes 4096"):
        open_manager(min_free_bytes=8192, max_free_bytes=4096)


@pytest.mark.parametrize("size", [2**59, 2**63, 2**64, 2**70])
@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_dim", "max_seq_len"])
def test_a_kv_shape_beyond_64_bits_is_a_value_error(name: str, size: int) -> None:
    sizes = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 64, "max_seq_len": 64, name: size}
    for layers_per_plane in (1, None):
        with pytest.raises(ValueError, match=r"overflows|64 bits|does not divide"):
            KVSpec(**sizes, layers_per_plane=layers_per_plane)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_tokens", [2**59, 2**63, 2**70, -1])
def test_bytes_of_more_tokens_than_64_bits_count_are_a_value_error(num_tokens: int) -> None:
    with open_manager() as manager, pytest.raises(ValueError, match="num_tokens"):
        manager.bytes_for(num_tokens)


def test_a_label_that_is_refused_leaks_no_slot() -> None:
    with open_manager(max_requests=2) as manager:
        for _ in range(4):
            with pytest.raises(TypeError):
                manager.create(label=7)  # type: ignore[arg-type]
        assert manager.stats().num_vtensors == 0


def test_a_vtensor_tells_of_itself_while_the_manager_sleeps() -> None:
    with open_manager() as manager:
        vtensor = manager.create()
        manager.sleep()
        assert vtensor.info().slot == vtensor.slot
        manager.wake()
