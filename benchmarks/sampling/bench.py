"""One token per row of logits, by our kernel and by torch; see README.md beside this file.

python benchmarks/sampling/bench.py [--json FILE] [--threads N] [--quick]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

from provenance import write_report

from flexinfer.runtime.torch_settings import set_up_torch

set_up_torch()  # threads and malloc as an engine has them; before torch is loaded

import torch  # noqa: E402

from flexinfer.runtime.kernels import available_isas  # noqa: E402
from flexinfer.sampling import host_sampler  # noqa: E402

SHAPES = ((64, 8192), (32, 131_072))
FILTERS = {
    "all": (0, 1.0),
    "top_k=50": (50, 1.0),
    "top_p=0.95": (0, 0.95),
    "top_k=50, top_p=0.95": (50, 0.95),
}
Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch's threads")
    parser.add_argument("--quick", action="store_true", help="two rounds: does it work at all?")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    load_before = os.getloadavg()
    rows = [row for shape in SHAPES for row in measure(*shape, 2 if arguments.quick else 31)]
    body = {"threads": arguments.threads, "isa": available_isas()[-1], "results": rows}
    print(f"load average before: {load_before[0]:.1f}; {arguments.threads} threads")
    write_report(arguments.json, "sampling", body, load_before=load_before)


def measure(num_rows: int, vocab_size: int, rounds: int) -> list[Row]:
    """Milliseconds per call at temperature 1; the ways take turns in each round."""
    torch.manual_seed(0)
    logits = 2 * torch.randn(num_rows, vocab_size)
    ways: dict[str, Callable[[], object]] = {
        f"kernel, {name}": kernel_call(logits, *chosen) for name, chosen in FILTERS.items()
    }
    ways |= {
        "torch, exponential race": lambda: exponential_race(logits),
        "torch, multinomial": lambda: torch.multinomial(torch.softmax(logits, -1), 1).tolist(),
        "torch, argmax": lambda: logits.argmax(-1).tolist(),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, call in ways.items():
            start = time.perf_counter()
            call()
            times[way].append(1e3 * (time.perf_counter() - start))
    rows = []
    print(f"\n| {num_rows} x {vocab_size:,} | median ms | least |\n|---|---|---|")
    for way, values in times.items():
        row = {"way": way, "median_ms": statistics.median(values), "least_ms": min(values)}
        rows.append({"rows": num_rows, "vocab_size": vocab_size, **row})
        print(f"| {way} | {row['median_ms']:.2f} | {row['least_ms']:.2f} |")
    return rows


def kernel_call(logits: torch.Tensor, top_k: int, top_p: float) -> Callable[[], list[int]]:
    """Another random number per row in each call."""
    count = len(logits)
    lists = [1.0] * count, [top_k] * count, [top_p] * count, [0.0] * count, list(range(count))
    step = iter(range(1 << 40))
    return lambda: host_sampler.sample_rows(logits, *lists, [next(step)] * count)


def exponential_race(logits: torch.Tensor) -> list[int]:
    """What the sampler did before: argmax of p / e with e exponential."""
    probs = torch.softmax(logits, dim=-1)
    chosen: list[int] = probs.div_(torch.empty_like(probs).exponential_()).argmax(dim=-1).tolist()
    return chosen


if __name__ == "__main__":
    main()
