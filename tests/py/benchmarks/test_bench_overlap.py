"""benchmarks/overlap runs, and writes the numbers that it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks" / "overlap"


def quick_run(file: Path) -> dict[str, Any]:
    arguments = ["--quick", "--setting", "sim-interleaved", "--json", str(file)]
    command = [sys.executable, str(FOLDER / "bench.py"), *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    setting: dict[str, Any] = json.loads(file.read_text())["settings"]["sim-interleaved"]
    return setting


def test_a_quick_run_hides_the_mapping_and_says_so(tmp_path: Path) -> None:
    """The worker has 20 ms per step. A machine that leaves it waiting longer may spoil one run, not
    all of them."""
    for idx in range(5):
        setting = quick_run(tmp_path / f"{idx}.json")
        modes = setting["modes"]
        assert modes["off"]["hidden_us_per_step"] == modes["off"]["rows_pre_extended"] == 0
        assert modes["on"]["hidden_us_per_step"] > 0
        assert modes["on"]["rows_pre_extended"] > 0
        assert set(setting["verdicts"]) == {"on", "on+eager"}
        if modes["on"]["exposed_us_per_step"] < modes["off"]["exposed_us_per_step"] / 3:
            return
    raise AssertionError(f"five times exposed: {modes}")
