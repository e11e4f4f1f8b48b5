"""benchmarks/overlap runs, and writes the numbers that it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "overlap"


def test_a_quick_run_hides_the_mapping_and_says_so(tmp_path: Path) -> None:
    file = tmp_path / "overlap.json"
    arguments = ["--quick", "--setting", "sim-interleaved", "--json", str(file)]
    command = [sys.executable, str(FOLDER / "bench.py"), *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    setting = json.loads(file.read_text())["settings"]["sim-interleaved"]
    assert setting["modes"]["off"]["hidden_us_per_step"] == 0
    assert setting["modes"]["on"]["hidden_us_per_step"] > 0
    assert setting["modes"]["on"]["exposed_us_per_step"] < (
        setting["modes"]["off"]["exposed_us_per_step"] / 3
    )
    assert set(setting["verdicts"]) == {"on", "on+eager"}
