"""Does `flexinfer simulate` say what two real servers do? See README.md beside this.

python benchmarks/simulation/compare.py --trace mooncake_conversation_trace.jsonl.gz [--json FILE]

Both play the same requests through the same router. The trace is public, and not part of this
repository.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "serving_http"))

from processes import Server
from provenance import write_report

from flexinfer.cli.settings import SHIPPED_MODEL
from flexinfer.cli.simulate.calibrate import calibrate
from flexinfer.loadgen.client import Client, Target
from flexinfer.loadgen.request import LoadRequest
from flexinfer.loadgen.trace import read_trace
from flexinfer.loadgen.workload import TraceScale
from flexinfer.routing.blocks import BLOCK_TOKENS, hash_blocks
from flexinfer.routing.prefix_index import PrefixIndex
from flexinfer.routing.routers import ROUTERS, ReplicaLoad, RoutedPrompt
from flexinfer.scheduler_config import SchedulerConfig
from flexinfer.simulation.arrivals import Arrival, arrivals_of
from flexinfer.simulation.fleet import Fleet
from flexinfer.simulation.replica import ReplicaShape
from flexinfer.simulation.report import summarise
from flexinfer.simulation.step_cost import StepCost
from flexinfer.vtensor import KVSpec

NUM_REPLICAS = 2
SPEC = KVSpec(num_layers=5, num_kv_heads=2, head_dim=32, dtype="float32", max_seq_len=2048)
"""The shipped model's."""
KV_BYTES = 64 << 20
CHUNK_BYTES = 32 << 10
MAX_NUM_SEQS = 16
VOCABULARY = range(8, 1000)
"""Ordinary tokens of the shipped model."""


@dataclass
class RealFleet:
    """Two servers behind a router in this process, which knows what the simulated one knows."""

    clients: list[Client]
    router: str
    ttft_ms: list[float] = field(default_factory=list)
    num_failed: int = 0

    def __post_init__(self) -> None:
        max_blocks = KV_BYTES // SPEC.bytes_per_token // BLOCK_TOKENS
        self.index = PrefixIndex(NUM_REPLICAS, max_blocks)
        self._choose = ROUTERS[self.router](self.index).choose
        self._loads = [ReplicaLoad() for _ in range(NUM_REPLICAS)]

    async def run(self, arrivals: Sequence[Arrival]) -> None:
        start_s = time.perf_counter()
        tasks = []
        for arrival in arrivals:
            await asyncio.sleep(max(0.0, start_s + arrival.time_s - time.perf_counter()))
            tasks.append(asyncio.create_task(self._send(arrival)))
        await asyncio.gather(*tasks)

    async def _send(self, arrival: Arrival) -> None:
        tokens = arrival.prompt_token_ids
        blocks = hash_blocks(tokens)
        chosen = self._choose(RoutedPrompt(len(tokens), blocks), self._loads)
        load = self._loads[chosen]
        waiting = len(tokens) - BLOCK_TOKENS * self.index.matches(blocks).get(chosen, 0)
        self.index.add(chosen, blocks)
        load.num_requests += 1
        load.num_waiting_tokens += waiting
        # The client tells of the first token with the last one: the load counts a little longer.
        outcome = await self.clients[chosen].send(
            LoadRequest(tokens, len(tokens), arrival.num_output_tokens)
        )
        load.num_requests -= 1
        load.num_waiting_tokens -= waiting
        if outcome.first_token_s is None:
            self.num_failed += 1
        else:
            self.ttft_ms.append(1e3 * outcome.first_token_s)


def main(argv: Sequence[str] | None = None) -> None:
    """Calibrate, simulate, run, compare; router by router, in turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=150)
    parser.add_argument("--length-scale", type=float, default=1 / 32)
    parser.add_argument("--time-scale", type=float, default=0.15)
    parser.add_argument("--router", action="append", choices=ROUTERS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    arguments = parser.parse_args(argv)
    load_before = os.getloadavg()
    arrivals = [as_text(arrival) for arrival in read_arrivals(arguments)]
    cost = calibrate(str(SHIPPED_MODEL), threads=1)
    rows = []
    for router in arguments.router or ["power-of-two", "cached-prefix"]:
        simulated = simulate(arrivals, router, cost)
        real = [run_real(arrivals, router) for _ in range(arguments.rounds)]
        rows.append({"router": router, "simulated": simulated, "real": real})
        for name, values in (("simulated", [simulated]), ("real", real)):
            print(router, name, *(statistics.median(v[k] for v in values) for k in simulated))
    body = {"cost": asdict(cost), "num_requests": len(arrivals), "rows": rows}
    write_report(arguments.json, "simulation", body, load_before=load_before)


def read_arrivals(arguments: argparse.Namespace) -> list[Arrival]:
    scale = TraceScale(time=arguments.time_scale, length=arguments.length_scale)
    entries = read_trace(arguments.trace, arguments.num_prompts)
    return list(arrivals_of(entries, scale, SPEC.max_seq_len))


def as_text(arrival: Arrival) -> Arrival:
    """The same with tokens that the model knows: equal ones stay equal."""
    first, size = VOCABULARY.start, len(VOCABULARY)
    tokens = [first + token * 2654435761 % 2**32 % size for token in arrival.prompt_token_ids]
    return Arrival(arrival.time_s, tokens, arrival.num_output_tokens)


def simulate(arrivals: Sequence[Arrival], router: str, cost: StepCost) -> dict[str, float]:
    scheduler = SchedulerConfig(max_model_len=SPEC.max_seq_len, max_num_seqs=MAX_NUM_SEQS)
    shape = ReplicaShape(SPEC, KV_BYTES, CHUNK_BYTES, scheduler, cost)
    found = summarise(Fleet(NUM_REPLICAS, shape, router).run(arrivals), SPEC.bytes_per_token)
    return {name: found[name] for name in ("p50_ttft_ms", "p90_ttft_ms", "hit_rate")}


def run_real(arrivals: Sequence[Arrival], router: str) -> dict[str, float]:
    """One server on each core; the router and the clients share them."""
    with tempfile.TemporaryDirectory() as logs, ExitStack() as stack:
        servers = [
            stack.enter_context(Server(command(number), {}, Path(logs) / f"{number}.log"))
            for number in range(NUM_REPLICAS)
        ]
        fleet = asyncio.run(play(servers, arrivals, router))
        hits, queries = (sum(counter(server.url, name) for server in servers) for name in COUNTERS)
    if fleet.num_failed:
        raise RuntimeError(f"{fleet.num_failed} of {len(arrivals)} requests failed")
    cuts = statistics.quantiles(fleet.ttft_ms, n=10)
    return {"p50_ttft_ms": cuts[4], "p90_ttft_ms": cuts[8], "hit_rate": hits / queries}


async def play(servers: Sequence[Server], arrivals: Sequence[Arrival], router: str) -> RealFleet:
    async with AsyncExitStack() as stack:
        options = {"ignore_eos": True, "temperature": 0}
        clients = [
            await stack.enter_async_context(Client(Target(s.url, s.model, options=options)))
            for s in servers
        ]
        for client in clients:  # the first request is no measure of those after it
            await client.send(LoadRequest([9] * 40, 40, 4))
        fleet = RealFleet(clients, router)
        await fleet.run(arrivals)
        return fleet


def command(number: int) -> list[str]:
    core = sorted(os.sched_getaffinity(0))[number % len(os.sched_getaffinity(0))]
    return [
        *("taskset", "-c", str(core), sys.executable, "-m", "flexinfer.cli", "serve"),
        *("--threads", "1", "--kv-cache-memory-bytes", str(KV_BYTES)),
        *("--chunk-bytes", str(CHUNK_BYTES), "--max-num-seqs", str(MAX_NUM_SEQS), "--port"),
    ]


COUNTERS = ("flexinfer:prefix_cache_hits_total", "flexinfer:prefix_cache_queries_total")


def counter(url: str, name: str) -> float:
    """The value of one counter of /metrics, labels apart."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines: list[Any] = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


if __name__ == "__main__":
    main()
