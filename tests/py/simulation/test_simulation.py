"""Fleets in virtual time: nothing lost, times as computed by hand, what routers are for."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sortedcontainers")
np = pytest.importorskip("numpy")

from typer.testing import CliRunner

from flexinfer.cli.app import app
from flexinfer.loadgen.trace import TraceEntry
from flexinfer.loadgen.workload import TraceScale
from flexinfer.routing.routers import ROUTERS
from flexinfer.scheduler_config import SchedulerConfig
from flexinfer.simulation.arrivals import Arrival, arrivals_of
from flexinfer.simulation.fleet import Fleet, FleetRun
from flexinfer.simulation.replica import ReplicaShape
from flexinfer.simulation.report import summarise
from flexinfer.simulation.step_cost import StepCost, StepWork, fit_cost
from flexinfer.vtensor import KVSpec

SPEC = KVSpec(2, 1, 8, "float32", 1024)
COST = StepCost(1000.0, 10.0, 100.0, 0.5, 0.01)
SHAPE = ReplicaShape(SPEC, 1 << 20, 4096, SchedulerConfig(max_model_len=1024, max_num_seqs=4), COST)


def simulate(arrivals: list[Arrival], router: str = "round-robin", n: int = 2) -> FleetRun:
    return Fleet(n, SHAPE, router).run(arrivals)


def conversations(num_users: int, num_turns: int, seed: int = 0) -> list[Arrival]:
    """Each turn repeats all before it; users take turns at random."""
    rng = random.Random(seed)
    texts = [[rng.randrange(2, 1 << 20) for _ in range(900)] for _ in range(num_users)]
    order = [user for user in range(num_users) for _ in range(num_turns)]
    rng.shuffle(order)
    lengths = dict.fromkeys(range(num_users), 0)
    arrivals = []
    for number, user in enumerate(order):
        lengths[user] += 64
        arrivals.append(Arrival(0.05 * number, texts[user][: lengths[user]], rng.randint(1, 9)))
    return arrivals


def test_one_request_takes_the_sum_of_its_steps() -> None:
    (done,) = simulate([Arrival(2.0, list(range(2, 102)), 3)], n=1).requests
    prefill_us = 1000 + 10 * 100 + 0.01 * (100 * 101 // 2)
    decodes_us = 2 * (1000 + 100) + 0.5 * (101 + 102)
    assert done.first_token_s == pytest.approx(2 + prefill_us / 1e6)
    assert done.end_s == pytest.approx(2 + (prefill_us + decodes_us) / 1e6)
    assert (done.num_output_tokens, done.num_cached_tokens, done.error) == (3, 0, None)


@pytest.mark.parametrize("router", ROUTERS)
def test_nothing_is_lost_and_every_run_is_the_same(router: str) -> None:
    arrivals = conversations(10, 6)
    run, again = (simulate(arrivals, router, n=3) for _ in range(2))
    assert run == again
    assert [one.num_output_tokens for one in run.requests] == [
        a.num_output_tokens for a in arrivals
    ]
    assert all(one.first_token_s <= one.end_s <= run.end_s for one in run.requests)  # type: ignore[operator]
    assert sum(run.busy_s) <= 3 * run.end_s


def test_loads_are_back_at_nothing() -> None:
    fleet = Fleet(2, SHAPE, "cached-prefix")
    fleet.run(conversations(4, 3))
    loads = fleet._loads.values()
    assert [(load.num_requests, load.num_waiting_tokens) for load in loads] == [(0, 0)] * 2


def test_one_replica_finds_what_its_radix_tree_has() -> None:
    """Turn n of a conversation finds all of turn n - 1, as long as nothing is evicted."""
    run = simulate(conversations(1, 8), n=1)
    assert [one.num_cached_tokens for one in run.requests] == [64 * turn for turn in range(8)]
    assert all(one.num_elsewhere_tokens == 0 for one in run.requests)


def test_routers_that_know_prefixes_find_more() -> None:
    """12 conversations on 4 replicas: at random three of four turns land elsewhere."""
    found = {
        name: summarise(simulate(conversations(12, 8), name, n=4), SPEC.bytes_per_token)
        for name in ("power-of-two", "prefix-affinity", "cached-prefix")
    }
    for name in ("prefix-affinity", "cached-prefix"):
        assert found[name]["hit_rate"] > 1.5 * found["power-of-two"]["hit_rate"]
        assert found[name]["kv_elsewhere_bytes"] < found["power-of-two"]["kv_elsewhere_bytes"]


def test_a_request_that_cannot_fit_ends_alone() -> None:
    shape = replace(SHAPE, kv_cache_bytes=16 * 4096)
    arrivals = [Arrival(0.0, list(range(2, 902)), 4), Arrival(0.0, list(range(5000, 5100)), 4)]
    big, small = Fleet(1, shape, "random").run(arrivals).requests
    assert big.error is not None
    assert "memory" in big.error
    assert (small.error, small.num_output_tokens) == (None, 4)


def test_blocks_of_a_trace_are_shared_and_nothing_else_is() -> None:
    entries = [
        TraceEntry(0.0, 1100, 5, (7, 8)),
        TraceEntry(1.0, 1030, 800, (7, 9)),
        TraceEntry(2.0, 600, 5, ()),
    ]
    first, second, third = arrivals_of(entries, TraceScale(time=0.5, length=0.25), 400)
    assert [first.time_s, second.time_s, third.time_s] == [0.0, 0.5, 1.0]
    assert first.prompt_token_ids[:128] == second.prompt_token_ids[:128]
    assert not set(first.prompt_token_ids[128:]) & set(second.prompt_token_ids)
    assert not set(third.prompt_token_ids) & set(first.prompt_token_ids)
    assert (second.num_output_tokens, len(second.prompt_token_ids)) == (200, 200)


def test_a_trace_without_times_is_refused() -> None:
    with pytest.raises(ValueError, match="lengths only"):
        list(arrivals_of([TraceEntry(None, 5, 5)], TraceScale(), 100))


def test_fitting_finds_the_costs_of_the_steps() -> None:
    rng = random.Random(1)
    works = [
        StepWork(1, rng.randrange(500), rng.randrange(32), rng.randrange(9000), rng.randrange(9999))
        for _ in range(200)
    ]
    found = fit_cost([(work, COST.seconds(work) * rng.uniform(0.99, 1.01)) for work in works])
    for name in StepCost.__slots__:
        assert getattr(found, name) == pytest.approx(getattr(COST, name), rel=0.2)


def test_a_cost_below_nothing_is_none() -> None:
    works = [StepWork(1, n, 32 - n, 0, 0) for n in range(1, 32)]
    found = fit_cost([(work, 1e-6 * (100 + 10 * work.num_prefill_tokens)) for work in works])
    assert min(found.decode_us, found.decode_key_us, found.prefill_pair_us) >= 0
    with pytest.raises(ValueError, match="measure more"):
        fit_cost([(StepWork(), 1.0)])


def write_trace(folder: Path) -> Path:
    rows = [
        {"timestamp": 100 * i, "input_length": 600, "output_length": 3, "hash_ids": [i % 3, 9 + i]}
        for i in range(30)
    ]
    file = folder / "trace.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def run_cli(*arguments: Any) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["simulate", *map(str, arguments)], env={"COLUMNS": "120"})
    return result.exit_code, result.output


def test_the_command_compares_routers(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    code, out = run_cli("--trace", write_trace(tmp_path), "--replicas", 2, "--json", file)
    assert code == 0, out
    report = json.loads(file.read_text())
    assert set(report["routers"]) == set(ROUTERS)
    assert all(numbers["num_completed"] == 30 for numbers in report["routers"].values())
    assert all(name in out for name in ROUTERS)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--router", "magic"), "must be one of"),
        (("--replicas", "0"), "--replicas"),
        (("--kv-cache-memory-bytes", "many"), "kv_cache_memory_bytes"),
        (
            ("--step-cost", "COST"),
            "is not a step cost, as --save-step-cost writes one: it",
        ),
        (("--trace-length-scale", "0"), "scales must be positive"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    wrong = tmp_path / "cost.json"
    wrong.write_text('{"step_us": -1}')
    given = [str(wrong) if one == "COST" else one for one in arguments]
    code, out = run_cli("--trace", write_trace(tmp_path), *given)
    assert code == 2
    assert says in " ".join(out.split())
    assert "Traceback" not in out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"object": "memory_map"}', "it has object, which is not supported; it may have step_us,"),
        ('{"step_us": 1}', "it needs prefill_token_us and decode_us and "),
        ("[1]", "it must be a mapping (a JSON object), got [1]"),
        (
            json.dumps(dict.fromkeys(StepCost.__slots__, "x")),
            "step_us must be a finite number, got 'x'",
        ),
        (json.dumps(dict.fromkeys(StepCost.__slots__, -1)), "costs must not be negative"),
        ("{", "is not a step cost"),
    ],
)
def test_a_file_that_is_no_step_cost_is_told_what_it_lacks(
    tmp_path: Path, text: str, says: str
) -> None:
    file = tmp_path / "cost.json"
    file.write_text(text)
    code, out = run_cli("--trace", write_trace(tmp_path), "--step-cost", str(file))
    assert code == 2
    assert says in " ".join(out.split())
    assert "__init__" not in out


def test_where_there_is_no_terminal_no_line_is_left_of_its_bars(tmp_path: Path) -> None:
    arguments = ("simulate", "--trace", write_trace(tmp_path), "--router", "random")
    result = CliRunner().invoke(app, [*arguments, "--replicas", "2"])
    assert (result.exit_code, result.stderr) == (0, "")
