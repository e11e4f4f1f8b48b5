"""benchmarks/sampling runs, and writes the numbers that it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks" / "sampling"


@pytest.mark.slow
def test_a_quick_run_says_what_each_way_takes(tmp_path: Path) -> None:
    file = tmp_path / "sampling.json"
    command = [sys.executable, str(FOLDER / "bench.py"), "--quick", "--json", str(file)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    rows = json.loads(file.read_text())["results"]
    assert {row["vocab_size"] for row in rows} == {8192, 131_072}
    assert all(row["least_ms"] > 0 for row in rows)
