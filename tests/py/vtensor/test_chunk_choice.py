"""The default chunk: as large as a huge page, as long as a row holds few tokens."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from flexinfer.vtensor import KVGroup, KVSpec, SimConfig, VTensorManager, settings

GIB = 1 << 30


def llama(layers_per_plane: int | None = None) -> KVSpec:
    return KVSpec(32, 8, 128, "float16", 8192, layers_per_plane)


def chosen(spec: KVSpec, budget: int = 8 * GIB, **options: object) -> int:
    with VTensorManager(
        spec, "sim", memory_budget=budget, max_requests=2, sim=SimConfig(), **options
    ) as manager:
        return manager.chunk_bytes


@pytest.mark.parametrize(
    ("layers_per_plane", "kib"),
    [(None, 2048), (2, 2048), (1, 512)],
)
def test_a_row_holds_at_most_256_tokens(layers_per_plane: int | None, kib: int) -> None:
    spec = llama(layers_per_plane)
    assert chosen(spec) == kib << 10
    assert chosen(spec) // spec.plane_token_bytes <= 256


def gemma() -> KVSpec:
    """Gemma-3-27B's shape: planes of 2 layers, 16 KiB a token."""
    kinds = (tuple(range(52)), 1024), (tuple(range(52, 62)), None)
    groups = [KVGroup(layers, 16, 128, 128, "bfloat16", window=w) for layers, w in kinds]
    return KVSpec.of_groups(groups, max_seq_len=32_768)


@pytest.mark.parametrize(
    ("budget_gib", "map_count", "row_tokens"),
    [
        (16, "65530", 64),
        (31, "65530", 64),
        (32, "65530", 128),  # of 1 MiB it would be more chunks than half of the mappings
        (32, "1048576", 64),
        (256, "1048576", 64),
        (32, "", 128),
    ],
)
def test_a_row_holds_at_most_a_sixteenth_of_the_smallest_window(
    budget_gib: int,
    map_count: str,
    row_tokens: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But for more chunks than there may be mappings."""
    (tmp_path / "max_map_count").write_text(map_count)
    monkeypatch.setattr(settings, "_MAP_COUNT", tmp_path / "max_map_count")
    spec = gemma()
    assert chosen(spec, budget_gib * GIB) // spec.plane_token_bytes == row_tokens


@pytest.mark.parametrize(
    ("chunk_kib", "places", "row_tokens"),
    [(1024, 52, 64), (2048, 55, 51)],  # 2 divides 52 and 10, 5 divides 55 and 10
)
def test_planes_of_windows_have_room_for_more_layers_where_rows_are_shorter_for_it(
    chunk_kib: int, places: int, row_tokens: int
) -> None:
    chunk_bytes = chunk_kib << 10
    with VTensorManager(gemma(), "sim", memory_budget=8 * GIB, chunk_bytes=chunk_bytes) as manager:
        near, full = manager.spec.groups
        assert (near.layers_per_plane, full.layers_per_plane) == (places, 10)
        assert chunk_bytes // manager.spec.plane_token_bytes == row_tokens


@pytest.mark.parametrize("window", [None, 1024])
def test_one_group_stays_as_it_is_given(window: int | None) -> None:
    group = KVGroup(tuple(range(31)), 4, 64, 64, "bfloat16", window=window)
    spec = KVSpec.of_groups([group], 4096)
    with VTensorManager(spec, "sim", memory_budget=8 * GIB, chunk_bytes=2 << 20) as manager:
        assert manager.spec is spec


def test_but_the_budget_is_no_more_than_16384_chunks_for_that() -> None:
    assert chosen(llama(1), budget=16 * GIB) == 1 << 20


def test_a_chunk_that_holds_many_tokens_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert chosen(llama(1), chunk_bytes="2MiB") == 2 << 20
        assert "holds 1024 tokens" in caplog.text
        caplog.clear()
        chosen(llama(1), chunk_bytes="512KiB")
        chosen(llama())
    assert not caplog.text
