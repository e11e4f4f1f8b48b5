"""benchmarks/windows/bench.py runs, and a long request holds little more than its windows need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "benchmarks" / "windows" / "bench.py"
RESULTS = ROOT / "benchmarks" / "results"


def test_two_layouts_are_compared(tmp_path: Path) -> None:
    file = tmp_path / "windows.json"
    command = [sys.executable, str(PROGRAM), "--quick", "--json", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    report = json.loads(file.read_text())
    assert 1.0 <= report["largest_ratio"] <= 1.1
    assert 1.0 <= report["largest_ratio_with_2_mib_chunks"] <= 1.1
    assert report["peak_resident_bytes"] < 0.75 * report["peak_resident_bytes_all_full"]


def test_the_committed_numbers_keep_the_bound() -> None:
    for file in RESULTS.glob("*/windows.json"):
        report = json.loads(file.read_text())
        assert report["last"]["num_tokens"] == 32_768
        assert report["largest_ratio"] <= 1.1
        assert report["largest_ratio_with_2_mib_chunks"] <= 1.1
