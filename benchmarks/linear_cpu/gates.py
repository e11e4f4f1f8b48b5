"""silu(gate) * up with quantised weights: in the product, against a pass of its own behind it.

    python benchmarks/linear_cpu/gates.py --json FILE          # --rows 1,32 --depth 2048: fewer

Each of several layers has a weight of its own, so that it comes from memory. Both ways in turns,
round by round; the ratio is the median of the rounds', with its quartiles.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

from provenance import write_report

from flexinfer.layers.linear import silu_gates
from flexinfer.layers.quantised import Scheme
from flexinfer.layers.quantised_linear import QuantisedLinear


def main() -> None:
    """Measure all schemes and rows; print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--schemes", default="int8,int4,int4-a8")
    parser.add_argument("--rows", default="1,4,32,512")
    parser.add_argument("--depth", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=8192, help="gates, and as many factors")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    load_before = os.getloadavg()
    rows = []
    print("| weight | rows | two passes, ms | one, ms | ratio |\n|---|---|---|---|---|")
    for scheme in args.schemes.split(","):
        layers = make_layers(scheme, args)
        for num_rows in map(int, args.rows.split(",")):
            row = {"scheme": scheme, "rows": num_rows, **measure(layers, num_rows, args.rounds)}
            rows.append(row)
            low, median, high = row["ratio"]
            times = f"{row['two_ms']:.3f} | {row['one_ms']:.3f}"
            print(f"| {scheme} | {num_rows} | {times} | {median:.2f}, {low:.2f} to {high:.2f} |")
    write_report(args.json, "linear_gates", {"rows": rows}, load_before=load_before)


def make_layers(scheme: str, args: argparse.Namespace) -> list[QuantisedLinear]:
    shape = 2 * args.hidden, args.depth
    weights = (torch.randn(shape) / args.depth**0.5 for _ in range(args.layers))
    kind = Scheme.parse(scheme)
    return [QuantisedLinear(kind.quantise(weight), None, torch.bfloat16) for weight in weights]


def measure(layers: list[QuantisedLinear], num_rows: int, rounds: int) -> dict[str, Any]:
    """Milliseconds a layer, and one pass' time over that of two."""
    x = torch.randn(1, num_rows, layers[0].in_features).bfloat16()

    def two() -> None:
        for layer in layers:
            silu_gates(layer.multiply(x, None))

    def one() -> None:
        for layer in layers:
            layer.multiply_gates(x)

    seconds: dict[Callable[[], None], list[float]] = {two: [], one: []}
    for i in range(rounds):
        for way in (two, one) if i % 2 else (one, two):
            begun = time.perf_counter()
            way()
            seconds[way].append((time.perf_counter() - begun) / len(layers))
    pairs = zip(seconds[two], seconds[one], strict=True)
    ratio = statistics.quantiles([after / before for before, after in pairs], n=4)
    two_ms, one_ms = (1000 * statistics.median(seconds[way]) for way in (two, one))
    return {"two_ms": two_ms, "one_ms": one_ms, "ratio": ratio}


if __name__ == "__main__":
    main()
