"""benchmarks/manager/growth.py and hit_rate.py run, and hold what they promise at small sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks" / "manager"


def run(program: str, *arguments: str) -> None:
    command = [sys.executable, str(FOLDER / program), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER.parents[1])
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def growth(tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("bench") / "growth.json"
    run("growth.py", "--quick", "--json", str(file))
    return json.loads(file.read_text())


def test_metadata_stays_within_its_bound_in_every_layout(growth: Any) -> None:
    assert len(growth["metadata_bytes_per_token"]) == 5
    assert all(0 < value < 16 for value in growth["metadata_bytes_per_token"].values())


def test_every_operation_is_timed_in_every_column(growth: Any) -> None:
    for table in ("cached_tokens", "parked_chunks"):
        rows = growth["us"][table]
        assert {"decode_step_64", "create_miss", "stats", "evict_a_chunk"} <= set(rows)
        assert all(len(row) == 2 and min(row.values()) > 0 for row in rows.values())


def test_parking_loses_no_hit(tmp_path: Path) -> None:
    """In the programs that once lost all, and on a trace in Mooncake's form."""
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": i, "input_length": 2048, "output_length": 1, "hash_ids": [0, i % 7, i % 3, i]}
        for i in range(50)
    ]
    trace.write_text("\n".join(json.dumps(line) for line in lines))
    file = tmp_path / "hits.json"
    run("hit_rate.py", "--trace", str(trace), "--json", str(file))
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 3 + 9 + 8
    for row in rows:
        assert row["hit_rate_parked"] >= row["hit_rate_not_parked"], row
