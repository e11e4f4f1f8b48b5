"""The GPU benchmarks run on the CPU at toy sizes, and write the numbers that they promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"


def run(name: str, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    file = tmp_path / "numbers.json"
    command = [sys.executable, str(FOLDER / name / "bench.py"), "--device", "cpu", "--json"]
    done = subprocess.run([*command, str(file), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    report: dict[str, Any] = json.loads(file.read_text())
    assert report["benchmark"] == name
    assert report["quick"] is True
    assert {"date", "command", "cpu", "load", "torch", "commit"} <= report["environment"].keys()
    return report


def test_api_latency_measures_every_call(tmp_path: Path) -> None:
    report = run("api_latency", tmp_path)
    assert report["left_out"] == []
    for row in report["latency_us"]:
        assert all(row[kind] > 0 for kind in ("create", "map", "set_access", "unmap", "release"))


def test_a_deadline_leaves_out_and_says_what(tmp_path: Path) -> None:
    report = run("api_latency", tmp_path, "--seconds", "0")
    assert report["left_out"] == ["chunks of 2 MiB", "chunks of 4 MiB"]
    assert report["latency_us"] == []


@pytest.mark.slow
def test_kernels_are_right_on_every_layout(tmp_path: Path) -> None:
    report = run("kernels", tmp_path)
    assert report["failed"] == []
    assert all(row["correct"] for row in report["rows"])
    layouts = {row["layout"] for row in report["rows"] if row["kernel"] == "sdpa"}
    assert {"plain", "dense", "all in one", "plain again"} <= layouts
    assert any("flash-attn" in line for line in report["skipped"])


@pytest.mark.slow
def test_overlap_exposes_mapping_without_and_hides_it_with_pre_extension(tmp_path: Path) -> None:
    report = run("gpu_overlap", tmp_path)
    modes = {row["mode"]: row for row in report["modes"]}
    assert modes["off"]["exposed_us_a_step"] > 0
    assert modes["on"]["rows_pre_extended"] > 0
    assert modes["pre-mapped"]["exposed_us_a_step"] == 0
    deferred = {row["deferred"]: row for row in report["reclamation"]}
    assert deferred[True]["driver_calls_last_round"] < deferred[False]["driver_calls_last_round"]


@pytest.mark.slow
def test_end_to_end_compares_engines_that_agree(tmp_path: Path) -> None:
    report = run("end_to_end", tmp_path)
    assert len(report["rows"]) == 9
    for row in report["rows"]:
        assert "failed" not in row
        assert row["tokens_per_s"] > 0
        assert row["peak_kv_gib"] > 0


@pytest.mark.slow
def test_a_full_budget_evicts_and_ends_every_request(tmp_path: Path) -> None:
    report = run("full_budget", tmp_path)
    ours = [row for row in report["rows"] if row["engine"] == "flexinfer"]
    layouts = [row["layout"].partition(",")[0] for row in ours]
    assert layouts == 3 * ["interleaved"] + ["2 layers a plane"] + 2 * ["dense"]
    pages = [row for row in report["rows"] if row["engine"] == "pages"]
    assert [row["of"] for row in (pages[0], ours[0], pages[1], ours[1])] == [60, 60, 12, 12]
    assert pages[0]["chunks_evicted"] > 0
    assert all(row["requests"] == row["of"] for row in report["rows"])
    assert ours[0]["chunks_evicted"] > 0
    assert ours[0]["chunks_aliased"] > 0
