"""Attention on a vTensor's arena against the same kernel on a plain tensor, and paged kernels.

python benchmarks/kernels/bench.py [--device cpu|cuda] [--quick] [--json FILE] [--seconds N]
                                   [--parts decode,prefill,gqa] [--kernels sdpa,flash-attn]
See README.md beside this file.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu_common"))

import contiguous
import paged
import torch
from contiguous import NotSupported
from harness import Deadline, Row, finish, keep, parse, table
from problem import Problem, Shape, error_of
from sources import Layout, open_source
from timing import Timer, copy_bandwidth_gb_s

MAX_ERROR = 2e-2
"""Relative, in bfloat16, against float32; a row beyond it is a failure of the run."""
TARGET_RATIO = 1.02
MIB = 1 << 20
PARTS = ("decode", "prefill", "gqa")


@dataclass(frozen=True)
class Part:
    """A grid: each shape on each layout."""

    name: str
    num_layers: int
    shapes: tuple[Shape, ...]
    layouts: tuple[Layout, ...]
    paged: bool = True


def layouts_of(num_layers: int, quick: bool) -> tuple[Layout, ...]:
    """Plain first and last: the difference of the two is the noise of the run."""
    some = 8 if num_layers % 8 == 0 and num_layers > 8 else 2
    small, large = (64 << 10, 256 << 10) if quick else (2 * MIB, 16 * MIB)
    return (
        Layout("plain"),
        Layout("dense", 1, small),
        Layout(f"{some} a plane", some, small),
        Layout("all in one", num_layers, small),
        Layout("dense, large chunks", 1, large),
        Layout("all in one, large chunks", num_layers, large),
        Layout("plain again"),
    )


def parts_of(quick: bool) -> list[Part]:
    """The grids: Llama-3-8B's shape (32 heads, 8 KV heads, 128 wide), and its neighbours."""
    if quick:
        layers, base = 4, Shape(2, 128, 4, 2, 64)
        grid = [(1, 64), (2, 128)]
        prefills, gqa = [(1, 128, 32)], (1, 4)
    else:
        layers, base = 32, Shape(1, 1024, 32, 8, 128)
        grid = [(1, 1024), (1, 32768), (4, 32768), (8, 1024), (8, 8192)]
        grid += [(32, 4096), (64, 1024), (64, 4096), (128, 4096)]  # the last for 141 GB
        prefills = [(1, 4096, 512), (4, 4096, 512), (1, 16384, 512), (1, 32768, 512)]
        gqa = (1, 4, 32)
    decode = tuple(replace(base, batch=b, seq_len=s) for b, s in grid)
    prefill = tuple(replace(base, batch=b, seq_len=s, new_tokens=n) for b, s, n in prefills)
    layouts = layouts_of(layers, quick)
    heads = [
        Part(
            "gqa",
            4 if quick else 8,
            (replace(decode[-1], batch=2 if quick else 16, num_kv_heads=count),),
            (layouts[0], layouts[1], layouts[-1]),
        )
        for count in gqa
    ]
    return [
        Part("decode", layers, decode, layouts),
        Part("prefill", layers, prefill, (*layouts[:2], layouts[3], layouts[-1])),
        *heads,
    ]


def measure(problem: Problem, call: contiguous.Call, timer: Timer) -> Row:
    """Checks one request of the result, then times the call."""
    error = error_of(problem, call(), problem.shape.batch - 1)
    timing = timer.time(call)
    element = problem.q.element_size()
    seconds = timing.median_us / 1e6
    return {
        "us": timing.median_us,
        "p10_us": timing.p10_us,
        "p90_us": timing.p90_us,
        "graph": timing.graph,
        "kv_gb_s": round(problem.shape.kv_bytes(element) / seconds / 1e9, 1),
        "tflops": round(problem.shape.flops / seconds / 1e12, 2),
        "error": round(error, 5),
        "correct": error <= MAX_ERROR,
    }


def attempt(head: Row, problem: Problem, make: contiguous.Kernel, timer: Timer) -> Row:
    """A row: numbers, or why there are none."""
    try:
        return head | measure(problem, make(problem), timer)
    except NotSupported as reason:
        return head | {"skipped": str(reason)}
    except Exception as error:  # a kernel of whatever package: what it says is reported
        return head | {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}


def run_layout(
    part: Part,
    layout: Layout,
    timer: Timer,
    deadline: Deadline,
    device: str,
    kernels: Sequence[str],
) -> list[Row]:
    """These kernels on all shapes of one layout; the plain one also runs the paged kernels."""
    rows: list[Row] = []
    dtype = torch.bfloat16
    with open_source(layout, part.shapes, part.num_layers, device, dtype) as source:
        for shape in part.shapes:
            what = f"{part.name}: {layout.name}, {shape}"
            if shape in source.left_out:
                deadline.left_out.append(f"{what}: the card has too little memory")
                continue
            if deadline.passed(what):
                continue
            head = {"part": part.name, "layout": layout.name, **asdict(shape)}
            problem = source.problem(shape)
            for name, make in contiguous.KERNELS.items():
                if name in kernels:
                    rows.append(attempt(head | {"kernel": name}, problem, make, timer))
            if layout.name == "plain" and part.paged:
                rows += run_paged(head, problem, timer, kernels)
            del problem
    return rows


def run_paged(head: Row, problem: Problem, timer: Timer, kernels: Sequence[str]) -> list[Row]:
    """The paged kernels on the same KV, cut into pages."""
    rows = []
    cut: dict[int, paged.Pages] = {}
    for name, (page_size, make) in paged.KERNELS.items():
        if name not in kernels:
            continue
        if page_size not in cut:
            cut[page_size] = paged.cut(problem, page_size)
        pages = cut[page_size]
        row = head | {"kernel": name, "layout": f"paged, {page_size}"}
        rows.append(attempt(row, problem, lambda p, m=make, g=pages: m(p, g), timer))
    return rows


def add_ratios(rows: Sequence[Row]) -> None:
    """vs_plain: time over that of the same kernel on a plain tensor, both plain runs averaged."""
    plain: dict[tuple[object, ...], list[float]] = {}
    for row in rows:
        if row["layout"].startswith("plain") and "us" in row:
            plain.setdefault(key_of(row), []).append(row["us"])
    for row in rows:
        reference = plain.get(key_of(row))
        if "us" in row and reference:
            row["vs_plain"] = round(row["us"] / statistics.mean(reference), 4)


def key_of(row: Row) -> tuple[object, ...]:
    names = ("kernel", "batch", "seq_len", "num_heads", "num_kv_heads", "new_tokens", "part")
    return tuple(row[name] for name in names)


def verdicts(rows: Sequence[Row]) -> list[Row]:
    """For each part, kernel and layout: the median and the worst ratio to plain."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        if "vs_plain" in row:
            groups.setdefault((row["part"], row["kernel"], row["layout"]), []).append(
                row["vs_plain"]
            )
    return [
        {
            "part": part,
            "kernel": kernel,
            "layout": layout,
            "median_ratio": round(statistics.median(ratios), 3),
            "worst_ratio": round(max(ratios), 3),
            "within_2_percent": statistics.median(ratios) <= TARGET_RATIO,
        }
        for (part, kernel, layout), ratios in groups.items()
    ]


def once(rows: Iterable[Row], field: str) -> list[str]:
    """Each reason once for each kernel, and whether it is about the paged variant."""
    return sorted(
        {
            f"{row['kernel']}{', paged' if row['layout'].startswith('paged') else ''}: {row[field]}"
            for row in rows
            if field in row
        }
    )


def body_of(rows: Sequence[Row]) -> Row:
    """The benchmark's part of the JSON."""
    measured = [row for row in rows if "us" in row]
    return {
        "rows": measured,
        "verdicts": verdicts(measured),
        "skipped": once(rows, "skipped"),
        "failed": once(rows, "failed"),
    }


def judge(rows: Sequence[Row]) -> None:
    """Exits with an error where contiguous KV gave wrong results, or failed under a kernel that is
    right on a plain tensor. Whatever else a peer's kernel does is reported, and no fault of ours.
    """
    right = {row["kernel"] for row in rows if row["layout"] == "plain" and row.get("correct")}
    ours = [row for row in rows if not row["layout"].startswith(("plain", "paged"))]
    wrong = [
        f"{row['kernel']}, {row['layout']}: {row.get('failed', row.get('error'))}"
        for row in ours
        if row["kernel"] in right and ("failed" in row or not row.get("correct", True))
    ]
    if wrong:
        raise SystemExit(f"kernels that are right on a plain tensor are not on ours: {wrong}")
    if not right:
        raise SystemExit("no kernel gave right results")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print tables, write the numbers; `judge` says when the exit code is 1."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--kernels", default=",".join({**contiguous.KERNELS, **paged.KERNELS}))
    chosen, rest = parser.parse_known_args(argv)
    options = parse(__doc__, rest, seconds=150)
    deadline = Deadline(options.seconds)
    timer = Timer(options.device, seconds_a_call=0.02 if options.quick else 0.05)
    kernels = chosen.kernels.split(",")
    rows: list[Row] = []
    for part in parts_of(options.quick):
        if part.name not in chosen.parts.split(","):
            continue
        for layout in part.layouts:
            gc.collect()
            try:
                rows += run_layout(part, layout, timer, deadline, options.device, kernels)
            except NotSupported as reason:
                deadline.left_out.append(f"{part.name}: {layout.name}: {reason}")
            add_ratios(rows)
            keep(options, "kernels", deadline, body_of(rows))
    body = body_of(rows)
    columns = ["part", "kernel", "layout", "batch", "seq_len", "new_tokens", "num_kv_heads"]
    columns += ["us", "vs_plain", "kv_gb_s", "tflops", "error"]
    judged = body["verdicts"]
    tables = [
        table(body["rows"], columns, "attention, us per layer"),
        table(
            judged, list(judged[0]) if judged else [], "time over the same kernel on torch.empty"
        ),
    ]
    for field in ("skipped", "failed"):
        tables += [f"{field}: {line}" for line in body[field]]
    body["copy_gb_s"] = copy_bandwidth_gb_s(options.device)
    finish(options, "kernels", deadline, tables, body)
    judge(rows)


if __name__ == "__main__":
    main()
