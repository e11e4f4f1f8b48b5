"""benchmarks/attention_cpu runs, and writes the numbers that it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks" / "attention_cpu"


@pytest.mark.slow
def test_a_quick_run_compares_sharing_with_none_and_prefills_with_sdpa(tmp_path: Path) -> None:
    file = tmp_path / "attention.json"
    arguments = ["--quick", "--threads", "1", "--tables", "sharing,prefills", "--json", str(file)]
    command = [sys.executable, str(FOLDER / "bench.py"), *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    results = json.loads(file.read_text())["results"]
    assert {row["dtype"] for row in results["sharing"]} == {"float32", "bfloat16"}
    assert all(row["two_phase_us"] > 0 and row["copies_us"] > 0 for row in results["sharing"])
    assert all(row["host_us"] > 0 and row["sdpa_us"] > 0 for row in results["prefills"])
