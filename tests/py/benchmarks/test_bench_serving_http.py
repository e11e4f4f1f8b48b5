"""benchmarks/serving_http runs, and writes the numbers that it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("psutil")
pytest.importorskip("uvicorn")
pytest.importorskip("uvloop")
pytest.importorskip("httptools")

BENCH = Path(__file__).resolve().parents[3] / "benchmarks" / "serving_http" / "bench.py"


@pytest.mark.slow
def test_a_quick_run_serves_what_the_offline_engine_says(tmp_path: Path) -> None:
    file = tmp_path / "serving_http.json"
    arguments = ["--quick", "--dtype", "float32", "--models", str(tmp_path), "--json", str(file)]
    command = [sys.executable, str(BENCH), *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(file.read_text())
    targets = {row["target"]: row for row in report["summary"]}
    assert list(targets) == ["offline", "serve, stream", "serve, each token", "serve, whole"]
    assert {row["num_new_tokens"] for row in report["rows"]} == {4 * 64}
    for name in ("serve, stream", "serve, each token", "serve, whole"):
        assert targets[name]["same_text_percent"] == 100
        assert targets[name]["load_cpu_ms_per_token"] > 0
    assert targets["serve, stream"]["itl_p50_ms"] > 0
    assert "itl_p50_ms" not in targets["serve, whole"]
