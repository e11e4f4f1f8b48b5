"""Groups of layers whose KV has different shapes: one vTensor, one budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexinfer.replay.replay import replay
from flexinfer.vtensor import KVGroup, KVSpec, VTensorManager

CHUNK = 4096

FULL = KVGroup((0, 2), num_kv_heads=2, key_dim=64, value_dim=64)
HALF = KVGroup((1,), num_kv_heads=1, key_dim=96, value_dim=32, dtype="float16")
PADDED = replace(HALF, layers=(1, 4, 5), window=200, layers_per_plane=2)
LATENT = KVGroup((3,), num_kv_heads=1, key_dim=288, value_dim=0)


def manager_of(*groups: KVGroup, **options: Any) -> VTensorManager:
    spec = KVSpec.of_groups(groups, max_seq_len=128)
    settings = {"max_requests": 4, "memory_budget": 400 * CHUNK, "chunk_bytes": CHUNK, **options}
    return VTensorManager(spec, from_dlpack=np.from_dlpack, **settings)


def test_each_layer_has_the_shape_and_the_dtype_of_its_group() -> None:
    with manager_of(FULL, HALF, LATENT) as manager:
        vtensor = manager.create()
        vtensor.extend(5)
        assert vtensor.k(2).shape == (5, 2, 64)
        assert manager.v(0).shape == (4, 128, 2, 64)
        assert (vtensor.k(1).shape, vtensor.v(1).shape) == ((5, 1, 96), (5, 1, 32))
        assert (vtensor.k(1).dtype, vtensor.k(3).dtype) == (np.float16, np.float32)
        assert manager.spec.bytes_per_token == 2 * 2 * 2 * 64 * 4 + (96 + 32) * 2 + 288 * 4
        assert manager.spec.group_of(3) is LATENT
        with pytest.raises(LookupError, match="layer 3 keeps keys alone"):
            vtensor.v(3)
        with pytest.raises(LookupError, match="layer 4 is not one of the layers that keep KV"):
            vtensor.k(4)


@pytest.mark.parametrize("half", [HALF, PADDED], ids=["dense", "with room for a layer more"])
def test_no_two_tensors_overlap_and_the_arena_shows_what_the_views_do(half: KVGroup) -> None:
    with manager_of(FULL, half, LATENT) as manager:
        vtensors = [manager.create() for _ in range(3)]
        manager.extend(vtensors, [128] * 3)
        tensors = [
            (layer, which, vtensor)
            for vtensor in vtensors
            for layer in sorted({0, 2, 3, *half.layers})
            for which in ("k", "v")
            if layer != 3 or which == "k"
        ]
        for number, (layer, which, vtensor) in enumerate(tensors):
            getattr(vtensor, which)(layer)[:] = number + np.arange(128)[:, None, None]
        for number, (layer, which, vtensor) in enumerate(tensors):
            arena = getattr(manager, which)(layer)[vtensor.slot]
            assert (arena == number + np.arange(128)[:, None, None]).all()
        del arena
        manager.check_integrity()


def test_rows_hold_the_same_tokens_in_all_groups() -> None:
    """Tokens of 1,024 and 2,304 bytes: 4 and 9 chunks for 16 tokens."""
    latent = KVGroup((0,), num_kv_heads=1, key_dim=576, value_dim=0)
    small = KVGroup((1,), num_kv_heads=1, key_dim=256, value_dim=0)
    with manager_of(latent, small) as manager:
        assert (manager.spec.row_chunks, manager.spec.plane_token_bytes) == (13, 256)
        assert manager.bytes_for(16) == 13 * CHUNK
        assert manager.bytes_for(17) == 26 * CHUNK


def test_planes_of_one_token_size_take_a_chunk_of_each_row() -> None:
    """Ten layers and two of one shape: as one group of twelve in planes of two."""
    many = KVGroup(tuple(range(10)), num_kv_heads=1, key_dim=64, value_dim=64)
    few = KVGroup((10, 11), num_kv_heads=1, key_dim=64, value_dim=64)
    spec = KVSpec.of_groups([many, few], num_layers=12)
    assert (spec.num_planes, spec.row_chunks, spec.plane_token_bytes) == (2, 6, 1024)


def test_only_planes_of_windows_have_room_left_over() -> None:
    """Three layers in planes of two: a window pays for the fourth with its tokens alone."""
    spec = KVSpec.of_groups([PADDED, FULL, LATENT], 64)
    assert spec.bytes_per_token == 4 * 256 + 2 * 1024 + 1152
    assert spec.num_planes == 2 + 1 + 1
    with pytest.raises(ValueError, match="layers_per_plane 2 does not divide num_layers 3"):
        KVSpec.of_groups([replace(PADDED, window=None)], 64)


def test_one_group_given_is_the_spec_of_a_uniform_model() -> None:
    uniform = KVSpec(4, 2, 64, "float16", 256, layers_per_plane=2)
    group = KVGroup((0, 1, 2, 3), 2, 64, 64, "float16", layers_per_plane=2)
    given = KVSpec.of_groups([group], 256, num_layers=4)
    assert uniform.groups == given.groups
    for name in ("bytes_per_token", "num_planes", "row_chunks", "plane_token_bytes"):
        assert getattr(uniform, name) == getattr(given, name)


@pytest.mark.parametrize(
    ("groups", "num_layers", "message"),
    [
        ([], None, "at least one group"),
        ([FULL, KVGroup((2,), 1, 8, 8)], None, "layer 2 stands in the groups of KV twice"),
        ([FULL], 3, "layer 1 is missing from the groups of KV; the model has 3 layers"),
        ([FULL, HALF], 2, "layer 2 is not one of the model's"),
        ([KVGroup((0, 1, 2), 1, 8, 8, layers_per_plane=2)], None, "2 does not divide"),
    ],
)
def test_groups_that_do_not_fit_each_other_are_refused(
    groups: list[KVGroup], num_layers: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        KVSpec.of_groups(groups, 64, num_layers)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": ()}, "at least one layer"),
        ({"layers": (-1,)}, "a layer must be an integer of at least 0"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"key_dim": 0}, "key_dim"),
        ({"value_dim": -1}, "value_dim"),
        ({"key_dim": 2**64}, "key_dim does not fit in 64 bits"),
        ({"dtype": "int8"}, "dtype 'int8' is not supported"),
    ],
)
def test_a_group_that_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    shape = {"layers": (0,), "num_kv_heads": 1, "key_dim": 8, "value_dim": 8, **changes}
    with pytest.raises(ValueError, match=message):
        KVSpec.of_groups([KVGroup(**shape)])


@pytest.mark.parametrize("half", [HALF, PADDED], ids=["dense", "with room for a layer more"])
def test_a_trace_of_groups_is_replayed(half: KVGroup, tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    prompt = list(range(40))
    with manager_of(FULL, half, LATENT, swap_space=400 * CHUNK) as manager:
        manager.start_trace(path)
        first = manager.create(prompt)
        first.extend(40)
        first.record_prefix(prompt)
        second = manager.create([*prompt, 7])
        second.extend(41)
        first.extend(100)  # tokens that nobody else holds
        assert first.try_swap_out()
        assert first.try_swap_in(prompt)
        stats = manager.stats()
    report = replay(path)
    assert not report.shortages
    assert report.replayed.chunks_copied == stats.chunks_copied > 0
    assert report.replayed.chunks_swapped_in == stats.chunks_swapped_in > 0
