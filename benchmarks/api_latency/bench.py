"""What the driver's memory calls cost by chunk size, and how fast memory comes; see README.md.

python benchmarks/api_latency/bench.py [--device cpu|cuda] [--quick] [--json FILE]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu_common"))

from harness import Deadline, Row, finish, keep, parse, table

from flexinfer.vtensor import KVSpec, VTensorManager

MIB = 1 << 20
CHUNK_MIB = (2, 4, 16, 32)
NUM_LAYERS, HEAD_DIM, TOKENS_A_CHUNK = 2, 64, 16
PUBLISHED_A100_US = {"create": 29.0, "map": 2.0, "set_access": 38.0, "unmap": 34.0, "release": 23.0}
"""vAttention (Prabhu et al., 2024), Table 2: 2 MiB on an A100. Beside ours, never instead."""


@contextmanager
def open_manager(device: str, chunk_bytes: int, num_chunks: int) -> Iterator[VTensorManager]:
    """One plane, no background work, room for `num_chunks` chunks in one vTensor."""
    token_bytes = chunk_bytes // TOKENS_A_CHUNK
    heads = token_bytes // (2 * NUM_LAYERS * HEAD_DIM * 2)
    spec = KVSpec(NUM_LAYERS, heads, HEAD_DIM, "bfloat16", TOKENS_A_CHUNK * num_chunks)
    manager = VTensorManager(
        spec,
        device,
        max_requests=2,
        memory_budget=chunk_bytes * (num_chunks + 2),
        chunk_bytes=chunk_bytes,
        park=False,
        pre_extend=False,
    )
    try:
        yield manager
    finally:
        manager.close()


def driver_times(manager: VTensorManager) -> dict[str, tuple[int, float]]:
    """kind -> (calls, microseconds) so far."""
    return {kind: (one.calls, one.us) for kind, one in manager.stats().driver_calls.items()}


def latencies(device: str, chunk_bytes: int, repetitions: int) -> Row:
    """Median microseconds of each call for one chunk, by making and giving back one at a time."""
    times: dict[str, list[float]] = defaultdict(list)
    with open_manager(device, chunk_bytes, repetitions) as manager:
        for kind, (calls, us) in driver_times(manager).items():
            if calls:
                times[kind].append(us / calls)  # reserve: once, when the manager opens
        one_chunk = TOKENS_A_CHUNK
        for _ in range(repetitions):
            before = driver_times(manager)
            vtensor = manager.create()
            vtensor.extend(one_chunk)
            vtensor.release()
            manager.trim()
            for kind, (calls, us) in driver_times(manager).items():
                if calls > before[kind][0]:
                    times[kind].append((us - before[kind][1]) / (calls - before[kind][0]))
    return {kind: round(statistics.median(values), 2) for kind, values in times.items()}


def batched(device: str, chunk_bytes: int, num_chunks: int) -> Row:
    """Microseconds a chunk of the calls that one extend() of many chunks needs."""
    with open_manager(device, chunk_bytes, num_chunks) as manager:
        before = driver_times(manager)
        vtensor = manager.create()
        vtensor.extend(TOKENS_A_CHUNK * num_chunks)
        vtensor.release()
        manager.trim()
        after = driver_times(manager)
    row: Row = {"chunks": num_chunks}
    for kind, (calls, us) in after.items():
        if calls > before[kind][0]:
            row[kind] = round((us - before[kind][1]) / num_chunks, 2)
            row[f"{kind}_calls"] = calls - before[kind][0]
    return row


def bandwidths(device: str, chunk_bytes: int, total_bytes: int) -> Row:
    """GB of KV memory a second: nothing created yet, chunks at hand, and a parked slot."""
    num_chunks = max(2, total_bytes // chunk_bytes)
    row: Row = {"bytes": num_chunks * chunk_bytes}
    with open_manager(device, chunk_bytes, num_chunks) as manager:
        row["cold_gb_s"] = rate(manager, num_chunks)
        row["warm_gb_s"] = rate(manager, num_chunks)
    return row


def rate(manager: VTensorManager, num_chunks: int) -> float:
    """GB/s of one extend(); the chunks stay created afterwards."""
    vtensor = manager.create()
    num_tokens = TOKENS_A_CHUNK * num_chunks
    seconds = seconds_of(lambda: vtensor.extend(num_tokens))
    vtensor.release()
    return round(num_chunks * manager.chunk_bytes / seconds / 1e9, 2)


def seconds_of(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print three tables, write the numbers."""
    options = parse(__doc__, argv, seconds=40)
    deadline = Deadline(options.seconds)
    repetitions, batch, total = (8, 8, 32 * MIB) if options.quick else (64, 64, 4096 * MIB)
    single: list[Row] = []
    many: list[Row] = []
    speed: list[Row] = []
    body = {"latency_us": single, "batched_us": many, "bandwidth": speed}
    for mib in CHUNK_MIB if not options.quick else CHUNK_MIB[:2]:
        if deadline.passed(f"chunks of {mib} MiB"):
            continue
        size = mib * MIB
        single.append({"chunk_mib": mib, **latencies(options.device, size, repetitions)})
        many.append({"chunk_mib": mib, **batched(options.device, size, batch)})
        speed.append({"chunk_mib": mib, **bandwidths(options.device, size, total)})
        keep(options, "api_latency", deadline, body)
    kinds = ["reserve", "create", "map", "set_access", "fill", "unmap", "release"]
    published = {"chunk_mib": "2, A100", **PUBLISHED_A100_US}
    tables = [
        table(
            [*single, published], ["chunk_mib", *kinds], "median us of a call, one chunk at a time"
        ),
        table(many, ["chunk_mib", "chunks", *kinds], "us per chunk, many chunks in one extend()"),
        table(speed, ["chunk_mib", "bytes", "cold_gb_s", "warm_gb_s"], "GB of KV memory a second"),
    ]
    finish(
        options, "api_latency", deadline, tables, {**body, "published_a100_us": PUBLISHED_A100_US}
    )


if __name__ == "__main__":
    main()
