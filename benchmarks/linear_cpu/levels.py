"""Products with quantised weights by instruction set: bfloat16 inputs against float32 ones.

    python benchmarks/linear_cpu/levels.py --json FILE [--levels avx2,avx512_vnni] [--rows 1,32]

Float32 inputs are multiplied as floats at every level, as bfloat16 ones are where the level has no
faster product of pairs: of integers of 16 bits, or of bfloat16. Ratios are taken round by round:
the median, the lowest and the highest.
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

from flexinfer import _kernels
from flexinfer.layers import quantised_linear
from flexinfer.layers.quantised import QuantisedTensor, Scheme
from flexinfer.layers.quantised_linear import QuantisedLinear, make_kernel
from flexinfer.layers.scale_levels import ScaleLevels

DTYPES = (torch.float32, torch.bfloat16)


def int4(columns: int, depth: int) -> QuantisedTensor:
    return Scheme.parse("int4").quantise(torch.randn(columns, depth) / depth**0.5)


def q4_k(columns: int, depth: int) -> QuantisedTensor:
    return random_weight(columns, depth, 4, 32, num_levels=2)


def q6_k(columns: int, depth: int) -> QuantisedTensor:
    return random_weight(columns, depth, 6, 16, num_levels=1)


def random_weight(
    columns: int, depth: int, bits: int, group: int, num_levels: int
) -> QuantisedTensor:
    """As GGUF's K-quants have it."""
    most = 1 << bits - 1
    integers = torch.randint(-most, most, (columns, depth)).to(torch.int8)
    levels = [
        ScaleLevels(
            torch.randint(0, 64, (columns, depth // group)).to(torch.int8),
            (1e-3 * torch.rand(columns, depth // 256)).half(),
        )
        for _ in range(num_levels)
    ]
    return QuantisedTensor.in_levels(integers, bits, group, *levels)


FORMATS: dict[str, Callable[[int, int], QuantisedTensor]] = {
    "int4": int4,
    "Q4_K": q4_k,
    "Q6_K": q6_k,
}


def use_level(level: str) -> None:
    chosen = make_kernel(level)
    vars(quantised_linear)["kernel"] = lambda: chosen


@torch.inference_mode()
def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    found = []
    for name, make in FORMATS.items():
        source = make(args.columns, args.depth)
        for level in args.levels:
            use_level(level)
            layers = {dtype: QuantisedLinear(source, None, dtype) for dtype in DTYPES}
            for rows in args.rows:
                row = {"format": name, "level": level, "rows": rows}
                found.append(row | compare(layers, torch.randn(rows, args.depth), args.rounds))
                show(found[-1])
    return found


def compare(
    layers: dict[torch.dtype, QuantisedLinear], x: torch.Tensor, rounds: int
) -> dict[str, Any]:
    """Milliseconds by dtype of inputs, the best, and how many times as fast bfloat16 ones are."""
    taken: dict[torch.dtype, list[float]] = {dtype: [] for dtype in layers}
    for repetition in range(rounds + 1):
        for dtype, layer in layers.items():
            inputs = x.to(dtype)
            start = time.perf_counter()
            layer(inputs)
            if repetition:
                taken[dtype].append(time.perf_counter() - start)
    floats, pairs = (taken[dtype] for dtype in DTYPES)
    ratios = [a / b for a, b in zip(floats, pairs, strict=True)]
    return {
        "float32_ms": 1e3 * min(floats),
        "bfloat16_ms": 1e3 * min(pairs),
        "ratio": [statistics.median(ratios), min(ratios), max(ratios)],
    }


def show(row: dict[str, Any]) -> None:
    print(
        f"| {row['format']} | {row['level']} | {row['rows']} | {row['float32_ms']:.3f} | "
        f"{row['bfloat16_ms']:.3f} | " + "{:.2f}, {:.2f} to {:.2f} |".format(*row["ratio"]),
        flush=True,
    )


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=numbers, default=[1, 4, 32, 256])
    parser.add_argument("--columns", type=int, default=8192)
    parser.add_argument("--depth", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--levels",
        type=lambda text: text.split(","),
        default=_kernels.available_quantised_isas(),
        help="all that this CPU has by default",
    )
    parser.add_argument("--json", type=Path, help="write the numbers here")
    args = parser.parse_args()
    load_before = os.getloadavg()
    print("| format | level | rows | float32 ms | bfloat16 ms | times as fast |")
    print("|---|---|---|---|---|---|")
    body = {"threads": torch.get_num_threads(), "results": measure(args)}
    settings = {name: value for name, value in vars(args).items() if name != "json"}
    write_report(args.json, "linear_levels", settings | body, load_before=load_before)


if __name__ == "__main__":
    main()
