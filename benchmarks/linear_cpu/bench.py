"""The linear layers' products alone, by oneDNN and by our own kernels; see README.md beside this
file.

python benchmarks/linear_cpu/bench.py [--json FILE] [--threads N] [--rows N,...] [--dtypes NAME,...]
"""

from __future__ import annotations

import argparse
import os
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

from flexinfer.layers import host_linear  # noqa: E402
from flexinfer.layers.onednn_linear import OneDnnLinear  # noqa: E402

# Inputs, outputs, with a residual: the layers of benchmarks/serving/models.py, those that one
# product computes joined; so many that their weights are not in a cache when they are used again.
SHAPES = {
    "small": (8, ((512, 1024, False), (512, 512, True), (512, 2816, False), (1408, 512, True))),
    "big": (3, ((1024, 1536, False), (1024, 1024, True), (1024, 5632, False), (2816, 1024, True))),
}
NAMES = ("qkv", "o", "gate_up", "down")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ROWS = (16, 32, 48, 64, 96, 128, 256, 512, 1088, 1536, 2048)
Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the tables, and write the numbers."""
    arguments = _arguments(argv)
    torch.set_num_threads(arguments.threads)
    load_before = os.getloadavg()
    rows = []
    for dtype in arguments.dtypes:
        for size in arguments.sizes:
            rows += measure(size, dtype, arguments.rows, 1 if arguments.quick else 9)
    print(f"load average before: {load_before[0]:.1f}; {arguments.threads} threads")
    body = {"threads": arguments.threads, "isa": host_linear.kernel().isa, "results": rows}
    write_report(arguments.json, "linear_cpu", body, load_before=load_before)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    def names(known: Sequence[str]) -> Callable[[str], list[str]]:
        def parse(text: str) -> list[str]:
            chosen = text.split(",")
            if not set(chosen) <= set(known):
                raise argparse.ArgumentTypeError(f"{text!r} is not of {', '.join(known)}")
            return chosen

        return parse

    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch's threads")
    parser.add_argument("--rows", type=numbers, default=ROWS, help="numbers of rows, by ,")
    parser.add_argument("--dtypes", type=names(tuple(DTYPES)), default=list(DTYPES))
    parser.add_argument("--sizes", type=names(tuple(SHAPES)), default=list(SHAPES))
    parser.add_argument("--quick", action="store_true", help="one round: only to see it work")
    return parser.parse_args(argv)


@torch.inference_mode()
def measure(size: str, dtype: str, num_rows: Sequence[int], rounds: int) -> list[Row]:
    """GFLOP/s of each shape and of all, for each number of rows; the best of `rounds` rounds."""
    num_layers, shapes = SHAPES[size]
    weights = [[_weight(*shape[:2], dtype) for shape in shapes] for _ in range(num_layers)]
    can_run = all(host_linear.supports(weight) for weight in weights[0])
    kinds: dict[str, type[OneDnnLinear]] = {"oneDNN": OneDnnLinear}
    if can_run:
        kinds["ours"] = host_linear.HostLinear
    layers = {
        name: [[kind(weight, None) for weight in layer] for layer in weights]
        for name, kind in kinds.items()
    }
    print(f"\n{size}, {dtype}, GFLOP/s\n")
    print(f"| rows | kernel | {' | '.join(NAMES)} | all |\n|---|---|{'---|' * 5}")
    rows = []
    for n in num_rows:
        inputs = [_inputs(n, *shape, dtype) for shape in shapes]
        best = {name: [float("inf")] * len(shapes) for name in kinds}
        for _ in range(rounds):
            for name in kinds:
                for i in range(len(shapes)):
                    seconds = _seconds([layer[i] for layer in layers[name]], *inputs[i])
                    best[name][i] = min(best[name][i], seconds)
        work = [2e-9 * n * depth * columns * num_layers for depth, columns, _ in shapes]
        for name, times in best.items():
            speeds = [flop / seconds for flop, seconds in zip(work, times, strict=True)]
            speeds.append(sum(work) / sum(times))
            print(f"| {n:,} | {name} | " + " | ".join(f"{x:,.0f}" for x in speeds) + " |")
            results = dict(zip((*NAMES, "all"), speeds, strict=True))
            rows.append({"size": size, "dtype": dtype, "rows": n, "kernel": name, **results})
    return rows


def _weight(depth: int, columns: int, dtype: str) -> torch.Tensor:
    return (torch.randn(columns, depth) / depth**0.5).to(DTYPES[dtype])


def _inputs(
    num_rows: int, depth: int, columns: int, has_residual: bool, dtype: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    x = torch.randn(1, num_rows, depth).to(DTYPES[dtype])
    return x, torch.randn(1, num_rows, columns).to(x.dtype) if has_residual else None


def _seconds(
    layers: Sequence[OneDnnLinear], x: torch.Tensor, residual: torch.Tensor | None
) -> float:
    begin = time.perf_counter()
    for layer in layers:
        layer.multiply(x, residual)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
