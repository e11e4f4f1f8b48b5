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

from helpers.benchmark_modules import fresh_benchmark_modules

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


def row(engine: str, *rates: float) -> dict[str, Any]:
    head = {"size": "small", "dtype": "float32", "workload": "mixed", "outputs": [[1, 2]]}
    memory = {"peak_memory_mib": rates[0], "peak_resident_mib": 1.0}
    return {**head, **memory, "engine": engine, "tokens_per_s": list(rates)}


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """bench.py and chart.py, whose names other benchmarks have as well."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("bench", "chart", "engines", "workloads", "models", "process_memory", "kv_use")
    for name in names:
        sys.modules.pop(name, None)
    import bench
    import chart

    yield bench, chart
    for name in names:
        sys.modules.pop(name, None)


def test_engines_that_take_turns_are_compared_round_by_round(scripts: tuple[Any, Any]) -> None:
    """The machine is half as fast in the second round, for both."""
    bench, _ = scripts
    rounds = [row("flexinfer", 100), row("vllm", 80), row("flexinfer", 50), row("vllm", 45)]
    ours, theirs = rows = bench.joined(rounds)
    bench.summarise(rows)
    assert theirs["round_ratios"] == [0.8, 0.9]
    assert theirs["ratio_to_flexinfer"] == pytest.approx(0.85)
    assert ours["rounds_tokens_per_s"] == [100, 50]
    assert ours["peak_memory_mib"] == 100


def test_the_chart_reads_the_latest_results_of_engines_that_took_turns(
    scripts: tuple[Any, Any], tmp_path: Path
) -> None:
    _, chart = scripts
    for day, rate in (("2026-11-22-cpu", 1.0), ("2026-11-23-cpu", 300.0)):
        (tmp_path / day).mkdir()
        for dtype in chart.DTYPES:
            rates = {chart.FLEXINFER: [rate, 2 * rate], chart.VLLM: [rate / 2, 2 * rate]}
            rows = [
                {"engine": engine, "dtype": dtype, "workload": load, "rounds_tokens_per_s": found}
                for engine, rounds in rates.items()
                for load, found in (("mixed", rounds), ("prefix", [7.0, 7.0]))
            ]
            path = tmp_path / day / f"serving_interleaved_{dtype}.json"
            path.write_text(json.dumps({"rows": rows}))
    for ours, theirs in chart.bars(tmp_path):
        assert (ours.date, ours.median, theirs.median) == ("2026-11-23", 450.0, 375.0)
        assert chart.ratio(ours, theirs) == "1.50 (1.00 to 2.00)"


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


def test_a_model_of_8_bits_is_the_plain_one_rounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As FlexInfer reads it; vLLM reads the same folder."""
    torch = pytest.importorskip("torch")
    from flexinfer.layers.quantised_linear import QuantisedLinear
    from flexinfer.models.loading import load_model

    monkeypatch.syspath_prepend(str(FOLDER))
    with fresh_benchmark_modules():
        import models

        folders = [models.make_model(tmp_path, "tiny", weights) for weights in models.WEIGHTS]
    plain, rounded = (load_model(str(folder)).model for folder in folders)
    products = [part for part in rounded.modules() if isinstance(part, QuantisedLinear)]
    assert len(products) == 2 * 4
    x = torch.linspace(-1, 1, 128).view(1, 1, -1)
    expected = plain.model.layers[0].mlp(x)
    found = rounded.model.layers[0].mlp(x.bfloat16()).float()
    assert (found - expected).norm() < 0.04 * expected.norm()
