"""benchmarks/speculation runs, and writes the numbers that it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks" / "speculation"


@pytest.mark.slow
def test_a_quick_run_says_what_speculation_brings(tmp_path: Path) -> None:
    file = tmp_path / "speculation.json"
    command = [sys.executable, str(FOLDER / "bench.py"), "--quick", "--json", str(file)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    rows = json.loads(file.read_text())["results"]
    assert [(row["task"], row["batch"]) for row in rows] == [
        (task, batch) for batch in (1, 32) for task in ("code edit", "summary", "unlike")
    ]
    assert all(row["ratio"] > 0 and 0 <= row["accepted"] <= 1 for row in rows)
