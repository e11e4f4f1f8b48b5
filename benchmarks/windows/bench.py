"""Resident bytes of a long request, with windows that give memory back and without; see README.md.

python benchmarks/windows/bench.py --json FILE [--plot FILE.svg] [--quick]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

from provenance import write_report

from flexinfer.vtensor import KVGroup, KVSpec, VTensorManager

GIB = 1 << 30
BUDGET = 16 * GIB
"""What the layout that keeps all needs at the end; the default chunk follows from it."""
LARGE_CHUNK = 2 << 20
"""The default of larger budgets, and CUDA's granularity."""


@dataclass(frozen=True)
class Shape:
    """Gemma-3-27B's: layer 5, 11, ... of 62 see all tokens, the others a window of 1,024."""

    num_full: int = 10
    num_windowed: int = 52
    num_kv_heads: int = 16
    head_dim: int = 128
    window: int = 1024

    @property
    def layer_bytes(self) -> int:
        """Of one token in one layer, in bfloat16."""
        return 2 * 2 * self.num_kv_heads * self.head_dim

    def formula(self, num_tokens: int) -> int:
        """What a request of so many tokens has to hold: all of them, or its window's."""
        windowed = self.num_windowed * min(num_tokens, self.window)
        return self.layer_bytes * (self.num_full * num_tokens + windowed)

    def spec(self, max_seq_len: int, window: int | None) -> KVSpec:
        kinds = [(self.num_full, None), (self.num_windowed, window)]
        groups, first = [], 0
        for num_layers, of_kind in kinds:
            layers = tuple(range(first, first + num_layers))
            groups.append(
                KVGroup(
                    layers, self.num_kv_heads, self.head_dim, self.head_dim, "bfloat16",
                    window=of_kind,
                )
            )  # fmt: skip
            first += num_layers
        return KVSpec.of_groups(groups, max_seq_len)


@dataclass(frozen=True)
class Point:
    """After a step."""

    num_tokens: int
    mapped_bytes: int
    """Behind the request's range."""
    resident_bytes: int
    """Of the whole pool: what has been given back and kept for the next row is among it."""


def generate(
    spec: KVSpec, prompt: int, end: int, step: int, chunk_bytes: int | None = None
) -> list[Point]:
    """One request: a prompt in parts of `step` tokens, then token by token; a point a step."""
    points = []
    with VTensorManager(
        spec,
        "sim",
        max_requests=1,
        memory_budget=BUDGET,
        chunk_bytes=chunk_bytes,
        step_tokens=step,
        max_free_bytes=0,
    ) as manager:
        vtensor = manager.create()
        for length in [*range(step, prompt, step), *range(prompt, end + 1)]:
            vtensor.extend(length)
            manager.forget([vtensor], [length])
            manager.pre_extend([vtensor], [min(length + 1, end)])  # the worker gives back more
            manager.drain()
            stats = manager.stats()
            points.append(Point(length, stats.mapped_bytes, stats.resident_bytes))
    return points


def main(argv: Sequence[str] | None = None) -> None:
    """Run both layouts, print a table, write the numbers and the picture."""
    arguments = _arguments(argv)
    load_before = os.getloadavg()
    prompt, end, step = (2048, 2304, 512) if arguments.quick else (2048, 32_768, 512)
    shape = Shape()
    windowed = generate(shape.spec(end, shape.window), prompt, end, step)
    large = generate(shape.spec(end, shape.window), prompt, end, step, LARGE_CHUNK)
    full = generate(shape.spec(end, None), prompt, end, step)
    rows = [_row(shape, *of_step) for of_step in zip(windowed, large, full, strict=True)]
    generated = [row for row in rows if row["num_tokens"] > prompt]
    every = max(1, len(rows) // 64)
    report = {
        "shape": asdict(shape) | {"dtype": "bfloat16", "chunk_bytes": _chunk_bytes(shape, end)},
        "prompt_tokens": prompt,
        "largest_ratio": max(row["ratio"] for row in generated),
        "largest_ratio_with_2_mib_chunks": max(row["ratio_with_2_mib"] for row in generated),
        "largest_resident_ratio": round(
            max(row["resident_bytes"] / row["formula_bytes"] for row in generated), 4
        ),
        "largest_ratio_of_second_half": max(r["ratio"] for r in generated[len(generated) // 2 :]),
        "peak_resident_bytes": max(row["resident_bytes"] for row in rows),
        "peak_resident_bytes_all_full": max(row["resident_bytes_all_full"] for row in rows),
        "last": rows[-1],
        "points": rows[::every] + rows[-1:],
    }
    _print(report)
    write_report(arguments.json, "windows", report, load_before=load_before)
    if arguments.plot:
        _plot(report, arguments.plot)


def _ratio(shape: Shape, point: Point) -> float:
    return round(point.mapped_bytes / shape.formula(point.num_tokens), 4)


def _row(shape: Shape, windowed: Point, large: Point, full: Point) -> dict[str, Any]:
    return asdict(windowed) | {
        "formula_bytes": shape.formula(windowed.num_tokens),
        "ratio": _ratio(shape, windowed),
        "mapped_bytes_with_2_mib": large.mapped_bytes,
        "ratio_with_2_mib": _ratio(shape, large),
        "mapped_bytes_all_full": full.mapped_bytes,
        "resident_bytes_all_full": full.resident_bytes,
    }


def _chunk_bytes(shape: Shape, end: int) -> int:
    with VTensorManager(shape.spec(end, shape.window), "sim", memory_budget=BUDGET) as manager:
        return manager.chunk_bytes


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--plot", type=Path, help="draw them into this file")
    parser.add_argument("--quick", action="store_true", help="few tokens: only to see it work")
    return parser.parse_args(argv)


def _print(report: dict[str, Any]) -> None:
    print("| tokens | formula, GiB | held, GiB | ratio | with 2 MiB | ratio | all full, GiB |")
    print("|---|---|---|---|---|---|---|")
    points = report["points"]
    for row in [*points[:: max(1, len(points) // 8)], points[-1]]:
        sizes = (
            "formula_bytes",
            "mapped_bytes",
            "mapped_bytes_with_2_mib",
            "mapped_bytes_all_full",
        )
        formula, held, large, full = (f"{row[name] / GIB:.2f}" for name in sizes)
        ratio, large_ratio = (f"{row[name]:.3f}" for name in ("ratio", "ratio_with_2_mib"))
        cells = (f"{row['num_tokens']:,}", formula, held, ratio, large, large_ratio, full)
        print(f"| {' | '.join(cells)} |")
    print(f"largest ratio while generating: {report['largest_ratio']}", file=sys.stderr)
    large = report["largest_ratio_with_2_mib_chunks"]
    print(f"with chunks of 2 MiB: {large}", file=sys.stderr)


def _plot(report: dict[str, Any], file: Path) -> None:
    import matplotlib.pyplot as plt

    points = report["points"]
    tokens = [row["num_tokens"] for row in points]
    figure, axis = plt.subplots(figsize=(7.5, 4.2))
    for name, label, style in (
        ("resident_bytes_all_full", "all layers keep all", "-"),
        ("resident_bytes", "windows give memory back", "-"),
        ("mapped_bytes_with_2_mib", "the same in chunks of 2 MiB", "--"),
        ("formula_bytes", "what the windows need (formula)", ":"),
    ):
        axis.plot(tokens, [row[name] / GIB for row in points], style, label=label)
    axis.set_xlabel("tokens of the request")
    axis.set_ylabel("resident, GiB")
    axis.set_ylim(bottom=0)
    axis.legend()
    figure.tight_layout()
    plt.rcParams["svg.hashsalt"] = "flexinfer"
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
