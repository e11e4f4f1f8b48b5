"""What benchmarks/serving_http makes of the results of vLLM's load generator; nothing is served."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("psutil")

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
NAMES = (
    "defaults",
    "memory",
    "processes",
    "text_model",
    "models",
    "workloads",
    "harness",
    "provenance",
)


@pytest.fixture
def defaults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Other benchmarks have modules of the same names."""
    for folder in ("serving", "serving_http"):
        monkeypatch.syspath_prepend(str(BENCHMARKS / folder))
    for name in NAMES:
        sys.modules.pop(name, None)
    import defaults

    yield defaults
    for name in NAMES:
        sys.modules.pop(name, None)


def row(server: str, round_idx: int, rate: float, p99_ms: float) -> dict[str, Any]:
    where = {"prompts": "random", "server": server, "round": round_idx}
    return {**where, "tokens_per_s": rate, "p99_ttft_ms": p99_ms}


def test_servers_are_compared_round_by_round_without_the_warm_up(defaults: Any) -> None:
    """The machine is half as fast in the last round, for both."""
    rows = [row("flexinfer", -1, 1, 9000), row("vllm", -1, 1000, 1)]
    for round_idx, speed in enumerate((2.0, 2.0, 1.0)):
        rows.append(row("flexinfer", round_idx, 600 * speed, 100))
        rows.append(row("vllm", round_idx, 500 * speed, 200 + round_idx))
    ours, theirs = defaults.summarise(rows)
    assert (ours["ratio"], theirs["ratio"]) == (1.2, 1.0)
    assert (ours["lowest"], ours["tokens_per_s"], ours["highest"]) == (600, 1200, 1200)
    assert (ours["p99_ttft_ms"], theirs["p99_ttft_ms"]) == (100, 201)


def test_texts_differ_from_round_to_round(defaults: Any) -> None:
    rounds = [defaults.source_texts(96, turn) for turn in range(6)]
    texts = [text for found in rounds for text in found]
    assert {len(found) for found in rounds} == {96}
    assert {len(text) for text in texts} == {defaults.NUM_TEXT_CHARS}
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize(
    ("name", "num_prompts", "sampling"),
    [
        ("mixed", 32, {}),
        ("sampled", 32, {"temperature": 1.0}),
        ("n8", 4, {"temperature": 1.0, "n": 8}),
    ],
)
def test_a_workload_says_how_to_sample(
    defaults: Any, name: str, num_prompts: int, sampling: dict[str, Any]
) -> None:
    import workloads

    def generate(prompts: list[list[int]], num_new: int, **asked: Any) -> list[list[int]]:
        assert (len(prompts), asked) == (num_prompts, sampling)
        return [[7] * num_new for _ in prompts for _ in range(asked.get("n", 1))]

    result = workloads.run(name, generate, 1, 0)
    assert result.num_new_tokens == 32 * 64


def test_the_memory_of_a_server_is_that_of_all_its_processes(defaults: Any) -> None:
    """A page that parent and child share counts once."""
    import memory

    child = subprocess.Popen([sys.executable, "-c", "import time; b = bytes(1); time.sleep(60)"])
    try:
        alone = memory.pss_bytes(SimpleNamespace(pids=lambda: [os.getpid()]))
        found = memory.pss_bytes(SimpleNamespace(pids=lambda: [os.getpid(), child.pid]))
    finally:
        child.kill()
        child.wait()
    assert 0 < alone["Pss"] < found["Pss"] < alone["Pss"] + (64 << 20)
    assert found["Pss"] == pytest.approx(
        found["Pss_Anon"] + found["Pss_File"] + found["Pss_Shmem"], abs=1 << 20
    )


@pytest.mark.parametrize(("server", "less_kv_mib"), [("vllm", 400), ("flexinfer", 460)])
def test_memory_is_told_with_and_without_its_kv(
    defaults: Any, server: str, less_kv_mib: int
) -> None:
    import memory

    sizes = {name: {"Pss": mib << 20} for name, mib in (("idle", 300), ("loaded", 400))}
    peak = {"Pss": 500 << 20, "Pss_Shmem": 40 << 20}
    row = memory.columns({**sizes, "server": server, "peak": peak, "kv_bytes": 100 << 20})
    assert (row["idle_mib"], row["peak_mib"], row["peak_less_kv_mib"]) == (300, 500, less_kv_mib)
