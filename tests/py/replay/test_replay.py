"""A replay gives the recorded numbers, and tells what other settings would have done."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flexinfer.cli.app import app
from flexinfer.errors import TraceError
from flexinfer.replay.replay import replay
from flexinfer.vtensor import KVSpec, SimConfig, Stats, VTensorManager
from helpers.random_trace import RandomLife, open_manager

COUNTERS = [
    "prefix_hit_tokens",
    "chunks_aliased",
    "chunks_copied",
    "chunks_evicted",
    "chunks_adopted",
    "chunks_deduplicated",
    "chunks_given_back",
    "chunks_swapped_out",
    "chunks_swapped_in",
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.trace"


def record(path: Path, seed: int, device: str = "sim", **options: object) -> tuple[Stats, int]:
    with open_manager(device, **options) as manager:
        manager.start_trace(path)
        life = RandomLife(manager, seed)
        life.run(200)
        return manager.stats(), life.peak_resident_bytes


def change_line(path: Path, find: str, old: str, new: str) -> None:
    lines = path.read_text().splitlines(keepends=True)
    index = next(i for i, line in enumerate(lines) if find in line)
    lines[index] = lines[index].replace(old, new)
    path.write_text("".join(lines))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_replay_gives_the_recorded_numbers(path: Path, device: str, seed: int) -> None:
    stats, peak = record(path, seed, "cpu")
    report = replay(path, device)
    expected = {name: getattr(stats, name) for name in COUNTERS}
    assert {name: getattr(report.recorded, name) for name in COUNTERS} == expected
    assert {name: getattr(report.replayed, name) for name in COUNTERS} == expected
    assert report.recorded.peak_resident_bytes == report.replayed.peak_resident_bytes == peak
    assert report.shortages == []


@pytest.mark.parametrize(
    "options",
    [{"park": False}, {"alias": False}, {"dedup": False}, {"scrub": "off"}, {"pre_extend": False}],
    ids=str,
)
def test_every_policy_is_replayed_as_recorded(path: Path, options: dict[str, object]) -> None:
    stats, peak = record(path, 11, **options)
    report = replay(path)
    assert {n: getattr(report.replayed, n) for n in COUNTERS} == {
        n: getattr(stats, n) for n in COUNTERS
    }
    assert report.replayed.peak_resident_bytes == peak


@pytest.mark.parametrize("chunk_bytes", [8192, "16KiB"])
def test_another_chunk_size_replays(path: Path, chunk_bytes: int | str) -> None:
    record(path, 3)
    report = replay(path, chunk_bytes=chunk_bytes)
    assert report.chunk_bytes in (8192, 16384)
    assert report.replayed.peak_resident_bytes % report.chunk_bytes == 0
    assert report.num_operations == replay(path).num_operations


def test_larger_chunks_waste_more(path: Path) -> None:
    with open_manager(memory_budget="4MiB") as manager:
        manager.start_trace(path)
        live = [manager.create() for _ in range(3)]
        manager.extend(live, [3, 5, 9])
    small, large = replay(path), replay(path, chunk_bytes="64KiB")
    assert (small.waste_at_peak_bytes, large.waste_at_peak_bytes) == (6144, 3 * 65536 - 17 * 2048)


def test_another_layout_replays(path: Path) -> None:
    record(path, 3, memory_budget="1MiB")
    report = replay(path, layers_per_plane=1, memory_budget="16MiB")
    assert report.layers_per_plane == 1
    assert report.shortages == []


def test_without_aliasing_nothing_is_aliased_and_more_is_wasted(path: Path) -> None:
    with open_manager(memory_budget="4MiB") as manager:
        manager.start_trace(path)
        first = manager.create()
        first.extend(64)
        first.record_prefix(list(range(64)))
        sharers = [manager.create(list(range(64))) for _ in range(4)]
        assert all(sharer.num_cached_tokens == 64 for sharer in sharers)
    shared, copied = replay(path), replay(path, alias=False)
    assert (shared.waste_at_peak_bytes, copied.replayed.chunks_aliased) == (0, 0)
    assert copied.waste_at_peak_bytes == 4 * 64 * 2048


def test_less_memory_gives_shortages_that_name_the_request(path: Path) -> None:
    record(path, 3)
    report = replay(path, memory_budget=16 * 4096)
    assert report.replayed.peak_resident_bytes <= 16 * 4096
    assert report.shortages
    assert all(shortage.op for shortage in report.shortages)
    assert any(shortage.label.startswith("request-") for shortage in report.shortages)


def test_more_memory_avoids_shortages(path: Path) -> None:
    record(path, 3)
    report = replay(path, memory_budget="8MiB")
    assert report.recorded.num_shortages > 0
    assert report.num_shortages_avoided > 0
    assert report.shortages == []


def test_simulated_latency_is_counted_and_not_waited_for(path: Path) -> None:
    record(path, 3)
    report = replay(path, latency="a100")
    driver_us = report.replayed.driver_us_exposed + report.replayed.driver_us_hidden
    calls = report.replayed.driver_calls["create"].calls
    assert report.replayed.driver_calls["create"].us >= 110 * calls
    assert driver_us > replay(path, latency="none").replayed.driver_us_exposed


def test_pre_extension_hides_driver_time(path: Path) -> None:
    with open_manager() as manager:
        manager.start_trace(path)
        vtensor = manager.create()
        for length in range(1, 60):
            manager.pre_extend([vtensor], [length])
            manager.drain()
            vtensor.extend(length)
    hidden, exposed = replay(path).replayed, replay(path, pre_extend=False).replayed
    assert hidden.driver_us_exposed * 50 < exposed.driver_us_exposed
    assert exposed.driver_us_hidden == 0


def test_pins_expire_by_the_recorded_time(path: Path) -> None:
    with open_manager() as manager:
        manager.start_trace(path)
        vtensor = manager.create()
        vtensor.extend(8)
        vtensor.record_prefix(list(range(8)))
        manager.pin_prefix(list(range(8)), "owner", ttl_s=0.002)
        vtensor.release()
        time.sleep(0.01)
        manager.evict(4 * 4096)
        stats = manager.stats()
    report = replay(path)
    assert "expire_pins" in report.operations
    assert report.replayed.chunks_evicted == stats.chunks_evicted > 0


def test_a_trace_that_begins_in_the_middle_replays(path: Path) -> None:
    with open_manager() as manager:
        vtensor = manager.create()
        vtensor.extend(10)
        manager.start_trace(path)
        vtensor.extend(20)
    report = replay(path)
    assert report.replayed.peak_resident_bytes == 20 * 2048


def test_a_trace_while_the_worker_runs_replays(path: Path) -> None:
    with open_manager(min_free_bytes=8 * 4096, max_free_bytes=12 * 4096) as manager:
        manager.start_trace(path)
        RandomLife(manager, seed=4, drain=False).run(300)
        manager.drain()
    report = replay(path)
    assert report.num_skipped == 0
    assert "upkeep" in report.operations


def test_a_cut_off_file_replays_as_far_as_it_goes_if_allowed(path: Path) -> None:
    record(path, 3)
    path.write_text(path.read_text()[: path.stat().st_size // 2])
    with pytest.raises(TraceError, match="cut off"):
        replay(path)
    report = replay(path, allow_truncated=True)
    assert report.truncated
    assert report.num_operations > 20


def test_an_unknown_operation_is_an_error(path: Path) -> None:
    record(path, 3)
    change_line(path, '"op":"extend"', '"op":"extend"', '"op":"levitate"')
    with pytest.raises(TraceError, match=r"line \d+: operation 'levitate' is unknown"):
        replay(path)


def test_a_missing_field_is_an_error(path: Path) -> None:
    record(path, 3)
    change_line(path, '"op":"create"', '"salt"', '"pepper"')
    with pytest.raises(TraceError, match=r"line \d+: create lacks the field 'salt'"):
        replay(path)


def test_a_vtensor_from_nowhere_is_an_error(path: Path) -> None:
    record(path, 3)
    change_line(path, '"op":"extend"', '"ids":[', '"ids":[99999,')
    change_line(path, "99999", '"n":[', '"n":[1,')
    with pytest.raises(TraceError, match="vTensor 99999 was never created"):
        replay(path)


def test_a_sim_device_takes_its_own_settings() -> None:
    spec = KVSpec(1, 1, 64)
    with VTensorManager(spec, "sim", memory_budget="64GiB", sim=SimConfig("a100")) as manager:
        manager.create().extend(100)
        assert manager.stats().map_us_exposed > 100
    with pytest.raises(ValueError, match="sim is for device='sim'"):
        VTensorManager(spec, "cpu", sim=SimConfig())


# ------------------------------------------------------------------------------------ the command


def test_the_command_prints_tables(path: Path) -> None:
    record(path, 3)
    result = CliRunner().invoke(app, ["replay", str(path), "--chunk-bytes", "8KiB"])
    assert result.exit_code == 0, result.output
    assert "peak resident" in result.output
    assert "8.0 KiB" in result.output


def test_the_command_prints_json(path: Path) -> None:
    record(path, 3)
    result = CliRunner().invoke(app, ["replay", str(path), "--json", "--no-park"])
    numbers = json.loads(result.output)
    assert numbers["replayed"]["chunks_adopted"] == 0
    assert numbers["recorded"]["chunks_adopted"] > 0


def test_the_command_refuses_a_cut_off_file_in_one_line(path: Path) -> None:
    record(path, 3)
    path.write_text(path.read_text()[:-20])
    result = CliRunner().invoke(app, ["replay", str(path)])
    assert result.exit_code == 2
    assert "cut off" in result.output
    assert CliRunner().invoke(app, ["replay", str(path), "--allow-truncated"]).exit_code == 0
