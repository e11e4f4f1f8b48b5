"""Tokens per second and peak memory of FlexInfer, transformers and vLLM, side by side.

    python benchmarks/serving/bench.py --json serving.json
    python benchmarks/serving/bench.py --sizes small,big --dtypes float32,bfloat16
    python benchmarks/serving/bench.py --engines flexinfer,vllm-cpu-compiled --rounds 5 \\
        --repetitions 1 --vllm-python VENV/bin/python [--weights w8a8]

One process per engine, one at a time, the same prompts. With --rounds N each engine is started N
times, in turn, so that a machine that becomes slower does so for all: quote medians and ratios of
such a run, with their spread, never a lone number. Greedy outputs are compared in float32.
"""

from __future__ import annotations

import argparse
import ctypes.util
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

from engines import CLOCKS, DEFAULT_ENGINES, ENGINES
from provenance import write_report
from workloads import SAMPLED, WORKLOADS

from models import SIZES, WEIGHTS, make_model

HERE = Path(__file__).parent


def run_engine(engine: str, model: Path, args: argparse.Namespace, size: str, dtype: str) -> list:
    """Rows of one engine; a failed engine gives a row with its error."""
    python = args.vllm_python if engine.startswith("vllm") else sys.executable
    command = [python, str(HERE / "engines.py"), engine, "--model", str(model)]
    command += ["--size", size, "--dtype", dtype, "--workloads", args.workloads]
    command += ["--repetitions", str(args.repetitions), "--threads", str(args.threads)]
    command += ["--clock", args.clock]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(args.threads),
        "MKL_NUM_THREADS": str(args.threads),
        "GOMP_CPU_AFFINITY": f"0-{args.threads - 1}",
    }
    if engine.startswith("vllm"):
        del environment[
            "GOMP_CPU_AFFINITY"
        ]  # it binds its threads itself, and both halve its speed
        environment["LD_PRELOAD"] = ":".join(vllm_preloads(Path(python).absolute()))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0:
        error = done.stderr.strip().splitlines()[-1:] or ["no message"]
        rows.append({"engine": engine, "size": size, "dtype": dtype, "error": error[0]})
    return rows


def vllm_preloads(python: Path) -> list[str]:
    """What vLLM advises to preload for its CPU build, as far as this machine has it."""
    tcmalloc = ctypes.util.find_library("tcmalloc_minimal")
    openmp = python.parents[1] / "lib" / "libiomp5.so"
    found = [tcmalloc] if tcmalloc is not None else []
    return [*found, str(openmp)] if openmp.exists() else found


def same_tokens(row: dict[str, Any], reference: dict[str, Any]) -> float:
    """Fraction of tokens that equal the reference engine's."""
    pairs = [
        (a, b)
        for ours, theirs in zip(row["outputs"], reference["outputs"], strict=True)
        for a, b in zip(ours, theirs, strict=True)
    ]
    return sum(a == b for a, b in pairs) / len(pairs)


COLUMNS = {
    "tokens/s": ("median_tokens_per_s", 1),
    "first": ("first_tokens_per_s", 1),
    "ratio": ("ratio_to_flexinfer", 2),
    "peak MiB": ("peak_memory_mib", 0),
    "RSS MiB": ("peak_resident_mib", 0),
    "KV MiB": ("kv_resident_mib", 0),
    "held": ("kv_held_mib", 1),
    "needed": ("kv_needed_mib", 1),
    "same": ("same_tokens", 3),
}
"""Heading -> name in a row, digits."""


def print_table(rows: list[dict[str, Any]]) -> None:
    titles = "".join(f"{title:>9}" for title in COLUMNS)
    print(f"{'size':6} {'dtype':9} {'workload':10} {'engine':24}{titles}")
    for row in rows:
        head = f"{row['size']:6} {row['dtype']:9} {row.get('workload', ''):10} {row['engine']:24}"
        if "error" in row:
            print(f"{head} FAILED: {row['error']}")
            continue
        print(head + "".join(f"{number(row, *column):>9}" for column in COLUMNS.values()))


def number(row: dict[str, Any], name: str, digits: int) -> str:
    """What not every row has."""
    return f"{row[name]:.{digits}f}" if name in row else "-"


def joined(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for all rounds of an engine and a workload: all speeds, each round's median in
    order, the largest memory. A round that failed leaves its row as it is."""
    whole: dict[tuple[str, ...], dict[str, Any]] = {}
    failed = [row for row in rows if "error" in row]
    for row in [row for row in rows if "error" not in row]:
        key = (row["size"], row["dtype"], row["workload"], row["engine"])
        median = statistics.median(row["tokens_per_s"])
        if (first := whole.get(key)) is None:
            whole[key] = {**row, "rounds_tokens_per_s": [median]}
            continue
        first["rounds_tokens_per_s"].append(median)
        first["tokens_per_s"] = [*first["tokens_per_s"], *row["tokens_per_s"]]
        for name in ("peak_memory_mib", "peak_resident_mib"):
            first[name] = max(first[name], row[name])
    return [*whole.values(), *failed]


def summarise(rows: list[dict[str, Any]]) -> None:
    """Adds medians, ratios to FlexInfer in the same round, their median, and token agreement; drops
    the tokens themselves. Takes what `joined` gives."""
    ours = {
        (row["size"], row["dtype"], row["workload"]): row
        for row in rows
        if row["engine"] == "flexinfer" and "error" not in row
    }
    for row in rows:
        if "error" in row:
            continue
        row["median_tokens_per_s"] = statistics.median(row["tokens_per_s"])
    for row in rows:
        reference = ours.get((row["size"], row["dtype"], row.get("workload")))
        if "error" in row or reference is None:
            continue
        pairs = zip(row["rounds_tokens_per_s"], reference["rounds_tokens_per_s"], strict=False)
        ratios = [mine / theirs for mine, theirs in pairs]
        row["round_ratios"] = [round(ratio, 4) for ratio in ratios]
        row["ratio_to_flexinfer"] = statistics.median(ratios)
        row["same_tokens"] = same_tokens(row, reference)
    for row in rows:
        row.pop("outputs", None)


def vllm_version(args: argparse.Namespace) -> str:
    """Of the Python that has it; empty where none is measured."""
    if "vllm" not in args.engines:
        return ""
    code = "from importlib import metadata as m; print([m.version(d) for d in ('vllm', 'torch')])"
    command = [args.vllm_python, "-c", code.replace("'vllm'", repr("vllm-cpu"))]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="small", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument(
        "--workloads",
        default=",".join(WORKLOADS),
        help=f"of {', '.join(WORKLOADS + SAMPLED)} (default: %(default)s)",
    )
    parser.add_argument(
        "--engines", default=",".join(DEFAULT_ENGINES), help=f"of {', '.join(ENGINES)}"
    )
    parser.add_argument(
        "--weights",
        choices=WEIGHTS,
        default="plain",
        help="w8a8: int8 with a scale for each output, inputs of 8 bits; not for transformers",
    )
    parser.add_argument(
        "--vllm-python",
        default=os.environ.get("FLEXINFER_BENCH_VLLM_PYTHON", sys.executable),
        help="the Python that has vllm-cpu; also by FLEXINFER_BENCH_VLLM_PYTHON",
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1, help="times that each engine has its turn")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="processor: for one thread on a machine where others work, too",
    )
    parser.add_argument("--models", type=Path, default=Path("build/bench/models"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.clock == "processor" and args.threads != 1:
        parser.error("the processor's time is compared of one thread: others spin while they wait")
    load_before = os.getloadavg()
    rows: list[dict[str, Any]] = []
    for size in args.sizes.split(","):
        model = make_model(args.models, size, args.weights)
        for dtype in args.dtypes.split(","):
            for engine in args.engines.split(",") * args.rounds:
                start = time.perf_counter()
                rows += run_engine(engine, model, args, size, dtype)
                took = time.perf_counter() - start
                print(f"# {size} {dtype} {engine}: {took:.0f} s", file=sys.stderr, flush=True)
    rows = joined(rows)
    summarise(rows)
    print_table(rows)
    write_report(
        args.json,
        "serving",
        {"weights": args.weights, "rows": rows},
        load_before=load_before,
        vllm=vllm_version(args),
    )


if __name__ == "__main__":
    main()
