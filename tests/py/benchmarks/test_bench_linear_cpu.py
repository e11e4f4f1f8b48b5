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


def test_a_quick_run_compares_both_dtypes_at_a_level(tmp_path: Path) -> None:
    file = tmp_path / "levels.json"
    sizes = ["--columns", "64", "--depth", "256", "--rows", "1,3", "--rounds", "1"]
    command = [sys.executable, str(FOLDER / "levels.py"), *sizes, "--levels", "portable"]
    result = subprocess.run([*command, "--json", str(file)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    rows = json.loads(file.read_text())["results"]
    assert {(row["format"], row["level"], row["rows"]) for row in rows} == {
        (name, "portable", count) for name in ("int4", "Q4_K", "Q6_K") for count in (1, 3)
    }
    assert all(row["float32_ms"] > 0 and row["bfloat16_ms"] > 0 for row in rows)
