"""benchmarks/serving runs, writes the numbers that it promises, and counts memory as it says."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks" / "serving"
MIB = 1 << 20
SIZE_BYTES = 128 * MIB
SLACK_MIB = 24
"""What else a process of many tests may take or give back meanwhile."""


@pytest.fixture
def process_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    import process_memory

    yield process_memory
    del sys.modules["process_memory"]


@pytest.fixture
def memfd() -> Iterator[int]:
    fd = os.memfd_create("test")
    os.ftruncate(fd, SIZE_BYTES)
    yield fd
    os.close(fd)


def grown(process_memory: Any, before: int) -> Any:
    """MiB since `before`; other things come and go meanwhile."""
    return pytest.approx((process_memory.memory_bytes() - before) / MIB, abs=SLACK_MIB)


def test_shared_memory_counts_once_however_often_it_is_mapped(
    process_memory: Any, memfd: int
) -> None:
    before = process_memory.memory_bytes()
    maps = [mmap.mmap(memfd, SIZE_BYTES) for _ in range(3)]
    for one in maps:
        one[:: mmap.PAGESIZE] = b"x" * (SIZE_BYTES // mmap.PAGESIZE)
    assert grown(process_memory, before) == SIZE_BYTES / MIB
    for one in maps:
        one.close()
    assert grown(process_memory, before) == SIZE_BYTES / MIB  # a cache, still held


def test_a_peak_stays_when_its_memory_has_gone(process_memory: Any) -> None:
    with process_memory.PeakMemory(interval_s=0.005) as memory:
        before = memory.see()
        anonymous = mmap.mmap(-1, SIZE_BYTES)
        anonymous.write(b"x" * SIZE_BYTES)
        memory.see()
        anonymous.close()
    assert memory.peak_bytes - before > SIZE_BYTES - SLACK_MIB * MIB
    assert memory.see() < memory.peak_bytes - SIZE_BYTES // 2


def test_memory_of_children_counts(process_memory: Any) -> None:
    before = process_memory.memory_bytes()
    code = f"x = bytearray(b'x' * {SIZE_BYTES}); print(flush=True); input()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert process_memory.memory_bytes() - before > SIZE_BYTES - SLACK_MIB * MIB
        child.communicate(b"\n")


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["mixed", "prefix", "multiturn"])
def test_requests_hold_at_most_a_chunk_beyond_those_of_their_tokens(
    workload: str, tmp_path: Path
) -> None:
    file = tmp_path / "serving.json"
    arguments = ["--sizes", "tiny", "--dtypes", "float32", "--repetitions", "1"]
    arguments += ["--workloads", workload, "--engines", "flexinfer"]
    arguments += ["--models", str(tmp_path), "--json", str(file)]
    command = [sys.executable, str(FOLDER / "bench.py"), *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    [row] = json.loads(file.read_text())["rows"]
    assert row["median_tokens_per_s"] > 0
    assert 0 < row["kv_needed_mib"] <= row["kv_held_mib"] <= row["kv_resident_mib"]
    assert row["kv_resident_mib"] < row["peak_memory_mib"]
    assert row["kv_chunks_beyond_mean"] <= row["kv_chunks_beyond_most"] <= 1
