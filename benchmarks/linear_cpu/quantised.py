"""Products with quantised weights: our kernels against what torch and oneDNN have, milliseconds.

    python benchmarks/linear_cpu/quantised.py --json FILE      # --rows 1,32 --depth 2048: fewer

Each of several layers has a weight of its own, so that it comes from memory. A library's product
that lacks a part of the work (scales per token) is named so: it only gets faster by it. torchao is
measured where it is installed. `--levels avx512_bf16,amx` measures int8 by these levels as well.
The last rows say how many times as fast as our bfloat16 int8 is, round by round: the median, the
lowest and the highest.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

from provenance import write_report

from flexinfer.layers import quantised_linear
from flexinfer.layers.formats import make_linear
from flexinfer.layers.quantised import Scheme
from flexinfer.layers.quantised_linear import QuantisedLinear, kernel, make_kernel

Product = Callable[[torch.Tensor], Any]
BASELINE = "bfloat16, ours today"


def products(args: argparse.Namespace) -> dict[str, list[Product]]:
    """By name, one for each layer, of x [rows, depth] in bfloat16."""
    found: dict[str, list[Product]] = {}
    for _ in range(args.layers):
        weight = torch.randn(args.columns, args.depth) / args.depth**0.5
        for name, product in layer_products(weight, args.levels).items():
            found.setdefault(name, []).append(product)
    return found


def at_level(layer: QuantisedLinear, level: str) -> Product:
    """The same product by the kernel of a level."""
    chosen = make_kernel(level)

    def product(x: torch.Tensor) -> torch.Tensor:
        before, quantised_linear.kernel = quantised_linear.kernel, lambda: chosen
        try:
            return layer(x)
        finally:
            quantised_linear.kernel = before

    return product


def layer_products(weight: torch.Tensor, levels: list[str]) -> dict[str, Product]:
    columns, depth = weight.shape
    plain = torch.nn.Linear(depth, columns, bias=False, dtype=torch.bfloat16)
    plain.weight.data.copy_(weight)
    found: dict[str, Product] = {BASELINE: make_linear(plain)}
    for name in ("int8", "int4", "int4-g128"):
        layer = QuantisedLinear(Scheme.parse(name).quantise(weight), None, torch.bfloat16)
        found[f"{name}, ours"] = layer
        if name == "int8":
            found |= {f"int8, ours, {level}": at_level(layer, level) for level in levels}
    source = Scheme.parse("int8").quantise(weight)
    packed = torch.ops.onednn.qlinear_prepack(source.integers, None)
    scales, zeros = source.scales[:, 0].contiguous(), torch.zeros(columns, dtype=torch.int64)

    def onednn(x: torch.Tensor) -> torch.Tensor:
        """With one scale for all tokens, where ours has one each."""
        integers = torch.quantize_per_tensor(x.float(), 0.03, 128, torch.quint8).int_repr()
        return torch.ops.onednn.qlinear_pointwise(
            integers, 0.03, 128, packed, scales, zeros, None, 1.0, 0, x.dtype, "none", [], ""
        )

    found["int8, oneDNN qlinear (a scale per tensor)"] = onednn
    halves = scales.bfloat16()
    found["int8, torch._weight_int8pack_mm (W8A16)"] = lambda x: torch._weight_int8pack_mm(
        x, source.integers, halves
    )
    if find_spec("torchao") is not None:
        found["int8, torchao Int8DynamicActivationInt8Weight"] = torchao_int8(weight)
    for group in (32, 128):
        integers = torch.randint(0, 16, (columns, depth), dtype=torch.int32)
        four = torch._convert_weight_to_int4pack_for_cpu(integers, 2)
        both = torch.randn(depth // group, columns, 2).bfloat16()
        found[f"int4-g{group}, torch._weight_int4pack_mm_for_cpu"] = (
            lambda x, four=four, group=group, both=both: torch._weight_int4pack_mm_for_cpu(
                x, four, group, both
            )
        )
    return found


def torchao_int8(weight: torch.Tensor) -> Product:
    """As it is without torch.compile. torchao 0.18 has no products of 4 bits for CPUs."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    columns, depth = weight.shape
    layer = torch.nn.Linear(depth, columns, bias=False, dtype=torch.bfloat16)
    layer.weight.data.copy_(weight)
    holder = torch.nn.Sequential(layer)
    quantize_(holder, Int8DynamicActivationInt8WeightConfig())
    return holder


@torch.inference_mode()
def measure(args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    found = products(args)
    milliseconds: dict[str, dict[int, float]] = {name: {} for name in found}
    speedups: dict[str, dict[int, list[float]]] = {n: {} for n in found if n.startswith("int8, ou")}
    for rows in args.rows:
        x = torch.randn(rows, args.depth).bfloat16()
        taken: dict[str, list[float]] = {name: [] for name in found}
        for repetition in range(args.repetitions + 1):
            for name, layers in found.items():
                start = time.perf_counter()
                for layer in layers:
                    layer(x)
                if repetition:
                    taken[name].append((time.perf_counter() - start) / len(layers))
        for name, seconds in taken.items():
            milliseconds[name][rows] = round(1e3 * min(seconds), 3)
        for name, by_rows in speedups.items():
            ratios = [b / q for b, q in zip(taken[BASELINE], taken[name], strict=True)]
            spread = statistics.median(ratios), min(ratios), max(ratios)
            by_rows[rows] = [round(ratio, 3) for ratio in spread]
    return {
        "kernel": kernel().isa,
        "threads": torch.get_num_threads(),
        "ms": milliseconds,
        "times_as_fast_as_bfloat16": speedups,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rows", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 32, 256, 1024]
    )
    parser.add_argument("--columns", type=int, default=8192)
    parser.add_argument("--depth", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument(
        "--levels", type=lambda text: text.split(","), default=[], help="of int8; see the docstring"
    )
    parser.add_argument("--json", type=Path, help="write the numbers here")
    args = parser.parse_args()
    load_before = os.getloadavg()
    report = measure(args)
    print(f"{args.columns} x {args.depth}, {report['kernel']}, {report['threads']} threads: ms")
    print("| rows |" + "".join(f" {rows:,} |" for rows in args.rows))
    for name, by_rows in report["ms"].items():
        print(f"| {name} |" + "".join(f" {by_rows[rows]:.3f} |" for rows in args.rows))
    for name, by_rows in report["times_as_fast_as_bfloat16"].items():
        spreads = ("{:.2f}, {:.2f} to {:.2f}".format(*by_rows[rows]) for rows in args.rows)
        print(f"| {name}, times as fast | " + " | ".join(spreads) + " |")
    settings = {name: value for name, value in vars(args).items() if name != "json"}
    body = {**settings, **report}
    write_report(args.json, "linear_quantised", body, load_before=load_before)


if __name__ == "__main__":
    main()
