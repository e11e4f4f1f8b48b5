"""``flexinfer.vtensor``: what each method does, and what each misuse says."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kv_device
from flexinfer.errors import OutOfMemoryError, ReleasedError, VTensorError
from flexinfer.vtensor import KVSpec, VTensor, VTensorManager, available_memory_bytes, parse_bytes

pytestmark = pytest.mark.usefixtures("kv_device")

CHUNK = 4096
TOKENS_PER_CHUNK = 4  # 2 layers x 2 x 2 heads x 32 dims x 4 bytes = 1 KiB a token

PROMPT = list(range(10))  # two whole chunks and a half


def spec_of(**changes: Any) -> KVSpec:
    sizes = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 32, "max_seq_len": 64, **changes}
    return KVSpec(**sizes)


def open_manager(spec: KVSpec | None = None, **options: Any) -> VTensorManager:
    defaults = {"max_requests": 4, "memory_budget": 64 * CHUNK, "chunk_bytes": CHUNK}
    options = {**defaults, **kv_device.options(), **options}
    return VTensorManager(spec or spec_of(), **options)


@pytest.fixture
def manager() -> Iterator[VTensorManager]:
    with open_manager() as manager:
        yield manager
        if not manager.closed:
            manager.check_integrity()


def filled(manager: VTensorManager, tokens: list[int], value: float = 1, salt: str = "") -> VTensor:
    """A vTensor of ``tokens`` with ``value`` in the K and V of every token it had to compute."""
    vtensor = manager.create(tokens, cache_salt=salt)
    vtensor.extend(len(tokens))
    for layer in range(manager.spec.num_layers):
        vtensor.k(layer)[vtensor.num_cached_tokens :] = value
        vtensor.v(layer)[vtensor.num_cached_tokens :] = -value
    return vtensor


# ------------------------------------------------------------------------------------ KVSpec, sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [("64KiB", 65536), ("1.5GiB", 3 << 29), ("512M", 512 << 20), ("7", 7), (7, 7), (" 2 kb", 2048)],
)
def test_sizes_are_numbers_or_text(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "many", "1.2.3K", "-5", "9" * 400, True])
def test_text_that_is_no_size_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="memory_budget"):
        parse_bytes(text, "memory_budget")


def test_the_machine_has_memory() -> None:
    assert available_memory_bytes() > 1 << 20


@pytest.mark.parametrize(
    ("layers_per_plane", "num_planes", "token_bytes"),
    [(1, 8, 256), (2, 2, 1024), (4, 1, 2048), (None, 1, 2048)],
)
def test_layouts_have_planes_and_token_sizes(
    layers_per_plane: int | None, num_planes: int, token_bytes: int
) -> None:
    spec = spec_of(num_layers=4, layers_per_plane=layers_per_plane)
    assert (spec.num_planes, spec.plane_token_bytes) == (num_planes, token_bytes)
    assert spec.bytes_per_token == num_planes * token_bytes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers"),
        ({"head_dim": -1}, "head_dim"),
        ({"num_kv_heads": 1.5}, "num_kv_heads"),
        ({"max_seq_len": 0}, "max_seq_len"),
        ({"num_layers": 4, "layers_per_plane": 3}, "layers_per_plane 3 does not divide"),
        ({"dtype": "int8"}, "dtype 'int8' is not supported"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec_of(**changes)


# ------------------------------------------------------------------------------- opening a manager


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_budget": CHUNK - 1}, "less than one chunk"),
        ({"memory_budget": -1}, "memory_budget must be positive"),
        ({"chunk_bytes": 5000}, "5000 is not a positive multiple of the driver's granularity 4096"),
        ({"chunk_bytes": 0}, "chunk_bytes must be positive"),
        ({"max_requests": 0}, "max_requests"),
        ({"device": "tpu"}, "device"),
        ({"scrub": "sometimes"}, "scrub is one of 'owner', 'tenant', 'off'"),
        ({"tail": "random"}, "tail is one of"),
    ],
)
def test_a_manager_that_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_manager(**options)


def test_the_budget_holds_a_chunk_in_each_plane() -> None:
    with pytest.raises(ValueError, match="4 x 4096 bytes"):
        open_manager(spec_of(layers_per_plane=1), memory_budget=3 * CHUNK)


def test_a_manager_needs_no_sizes() -> None:
    with VTensorManager(spec_of(), max_requests=2) as manager:
        assert 4096 <= manager.chunk_bytes <= 2 << 20
        assert 0 < manager.memory_budget < available_memory_bytes()


def test_the_sim_device_needs_no_memory() -> None:
    big = spec_of(num_layers=32, num_kv_heads=8, head_dim=128, max_seq_len=32768)
    with VTensorManager(big, "sim", max_requests=8, memory_budget="80GiB") as manager:
        manager.create(range(32768)).extend(32768)
        assert manager.stats().resident_bytes == 32768 * big.bytes_per_token


# ---------------------------------------------------------------------------------------- lifecycle


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


# -------------------------------------------------------------------------------------------- close


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


# -------------------------------------------------------------------------------- prefixes, sharing


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
    manager.pin_prefix(PROMPT, "me", ttl_s=0.05)
    manager.trim()
    assert manager.evict(CHUNK) == 0
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


# --------------------------------------------------------------------------------- budget, shortage


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


@pytest.mark.parametrize("budget", [0, -1, CHUNK - 1, "no"])
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


# -------------------------------------------------------------------------------------------- views


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
    with open_manager(memory_budget=4 * CHUNK, tail="guard") as manager:
        vtensor = filled(manager, PROMPT, 5)
        view = vtensor.k(0)
        vtensor.truncate(0)
        assert not manager.create().try_extend(16)
        assert (view == 5).all()


# -------------------------------------------------------------------------------------------- scrub


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


# -------------------------------------------------------------------------------------------- torch


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


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )


@kv_device.cpu_only
def test_the_import_pulls_in_neither_torch_nor_numpy() -> None:
    code = "import sys, flexinfer.vtensor; print({'torch', 'numpy'} & set(sys.modules))"
    assert run_python(code).stdout.strip() == "set()"


@kv_device.cpu_only
def test_it_works_where_torch_is_not_installed() -> None:
    code = """
import sys
sys.modules["torch"] = None
from flexinfer.vtensor import KVSpec, VTensorManager
with VTensorManager(KVSpec(2, 2, 32, max_seq_len=64), memory_budget="1MiB") as manager:
    vtensor = manager.create([1, 2, 3])
    vtensor.extend(3)
    array = vtensor.k(0)
    assert hasattr(array, "__dlpack__"), type(array)
    import numpy
    numpy.from_dlpack(array)[:] = 2
    assert (numpy.from_dlpack(vtensor.k(0)) == 2).all()
print("good")
"""
    result = run_python(code)
    assert result.stdout.strip() == "good", result.stderr
