"""benchmarks/manager runs, and writes the numbers that it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks" / "manager"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=FOLDER.parents[1])


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("bench") / "manager.json"
    result = run(str(FOLDER / "bench.py"), "--quick", "--json", str(file))
    assert result.returncode == 0, result.stderr
    assert "load average" in result.stdout
    return json.loads(file.read_text())


@pytest.mark.parametrize(
    "name", ["decode_step_256_us", "match_4096_us", "create_2048_us", "fork_us"]
)
def test_headline_numbers_are_at_the_top(report: Any, name: str) -> None:
    assert report[name] > 0
    assert report[name] == report["devices"][report["headline_device"]][name]["median_us"]


def test_both_devices_report_the_same_operations(report: Any) -> None:
    assert set(report["devices"]) == {"host", "sim"}
    assert set(report["devices"]["host"]) == set(report["devices"]["sim"])


def test_driver_time_is_told_apart(report: Any) -> None:
    host = report["devices"]["host"]
    assert host["decode_step_256_us"]["driver_us"] == 0
    assert host["decode_step_256_sixteenth_us"]["driver_us"] > 0
    for operation in ("decode_step_256_windows_us", "forget_256_us"):  # the worker unmaps
        assert host[operation]["driver_us"] == 0
    for numbers in host.values():
        assert numbers["p10_us"] <= numbers["median_us"] <= numbers["p90_us"]


def test_an_unknown_device_is_refused() -> None:
    result = run(str(FOLDER / "bench.py"), "--device", "tpu")
    assert result.returncode == 2
    assert "'tpu' is not one of host, sim" in result.stderr
