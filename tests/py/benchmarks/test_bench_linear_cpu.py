"""benchmarks/linear_cpu runs, and writes the numbers that it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks" / "linear_cpu"


@pytest.mark.slow
def test_a_quick_run_says_the_speed_of_each_product(tmp_path: Path) -> None:
    file = tmp_path / "linear.json"
    arguments = ["--quick", "--rows", "8,64", "--sizes", "small", "--json", str(file)]
    command = [sys.executable, str(FOLDER / "bench.py"), "--threads", "1", *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    rows = json.loads(file.read_text())["results"]
    assert {(row["dtype"], row["rows"]) for row in rows} == {
        (dtype, num_rows) for dtype in ("float32", "bfloat16") for num_rows in (8, 64)
    }
    assert all(row[name] > 0 for row in rows for name in ("qkv", "o", "gate_up", "down", "all"))
