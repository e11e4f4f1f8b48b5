"""Generation by the whole engine against transformers' continuous batching; see README.md.

python benchmarks/end_to_end/bench.py [--models llama-3-8b,yi-6b] [--device cpu|cuda] [--quick]
                                      [--json FILE] [--seconds N]
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu_common"))

import torch
import workloads
from card import usable_bytes
from continuous_batching import kv_token_bytes
from device_models import SHAPES, make_model
from engines import ENGINES, Meter, fit_sizes
from harness import Deadline, Row, finish, keep, parse, table

GIB = 1 << 30


def measure(
    head: Row,
    name: str,
    sizes: workloads.Sizes,
    vocab: int,
    generate: workloads.Generate,
    deadline: Deadline,
) -> tuple[Row, workloads.Result | None]:
    """A warm-up at toy size, then one repetition."""
    try:
        workloads.run(name, workloads.TOY, vocab, generate, seed=0)
        synchronize(head["device"])
        start = time.perf_counter()
        result = workloads.run(name, sizes, vocab, generate, seed=1)
        seconds = time.perf_counter() - start
    except TimeoutError as error:
        deadline.left_out.append(f"{head}: no time left, {error}")
        return head | {"failed": f"out of time: {error}"}, None
    except (RuntimeError, ValueError) as error:
        return head | {"failed": f"{type(error).__name__}: {str(error)[:200]}"}, None
    return head | {
        "seconds": round(seconds, 3),
        "new_tokens": result.num_new_tokens,
        "prompt_tokens": result.num_prompt_tokens,
        "tokens_per_s": round(result.num_new_tokens / seconds, 1),
    }, result


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def run_engine(
    model: Any, head: Row, engine: str, sizes: workloads.Sizes, deadline: Deadline
) -> tuple[list[Row], dict[str, workloads.Result]]:
    """All workloads on one engine; what it has cached is given back between two of them."""
    rows: list[Row] = []
    results: dict[str, workloads.Result] = {}
    vocab = model.config.vocab_size
    static = sizes.max_requests * sizes.max_len * kv_token_bytes(model.config, model.dtype.itemsize)
    meter = Meter()
    try:
        with ENGINES[engine](model, sizes, meter) as generate:
            for name in workloads.NAMES:
                if deadline.passed(f"{head['model']}: {engine}: {name}"):
                    continue
                meter.reset()
                meter.deadline_s = time.monotonic() + deadline.remaining_s
                row = head | {"engine": engine, "workload": name}
                row, result = measure(row, name, sizes, vocab, generate, deadline)
                rows.append(row)
                if result is not None:
                    results[name] = result
                    row["peak_kv_gib"] = round(meter.peak_kv_bytes / GIB, 4)
                    row["static_kv_gib"] = round(static / GIB, 4)
                    row["kv_of_static"] = round(meter.peak_kv_bytes / static, 3)
    except (RuntimeError, ValueError, ImportError) as error:
        text = f"{type(error).__name__}: {str(error)[:200]}"
        rows.append(head | {"engine": engine, "workload": "all", "failed": text})
    gc.collect()
    if head["device"] == "cuda":
        torch.cuda.empty_cache()
    return rows, results


def add_comparison(rows: Sequence[Row], results: dict[tuple[str, str], Any], model: str) -> None:
    """speedup: over transformers' continuous batching; same_tokens: as FlexInfer's output."""
    for row in rows:
        if row["model"] != model or "tokens_per_s" not in row:
            continue
        peer = next(
            (
                other
                for other in rows
                if other["model"] == model
                and other["workload"] == row["workload"]
                and other["engine"] == "transformers-continuous"
                and "tokens_per_s" in other
            ),
            None,
        )
        if peer is not None:
            row["speedup"] = round(row["tokens_per_s"] / peer["tokens_per_s"], 3)
        ours = results.get(("flexinfer", row["workload"]))
        theirs = results.get((row["engine"], row["workload"]))
        if ours is not None and theirs is not None:
            row["same_tokens"] = round(agreement(ours.outputs, theirs.outputs), 3)


def agreement(ours: workloads.Prompts, theirs: workloads.Prompts) -> float:
    """Fraction of tokens that are equal; in bfloat16 sequences part ways at the first near-tie."""
    pairs = [
        (a, b)
        for one, other in zip(ours, theirs, strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    return sum(a == b for a, b in pairs) / len(pairs)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, write the numbers."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--models")
    parser.add_argument("--engines", default=";".join(ENGINES), help="separated by ;")
    chosen, rest = parser.parse_known_args(argv)
    options = parse(__doc__, rest, seconds=150)
    deadline = Deadline(options.seconds)
    wanted = workloads.TOY if options.quick else workloads.FULL
    models = (chosen.models or ("toy" if options.quick else "llama-3-8b,yi-6b")).split(",")
    torch.set_grad_enabled(False)
    rows: list[Row] = []
    for name in models:
        if name not in SHAPES:
            raise SystemExit(f"no model {name!r}; there are: {', '.join(SHAPES)}")
        if deadline.passed(name):
            continue
        start = time.perf_counter()
        model = make_model(name, options.device, torch.bfloat16)
        synchronize(options.device)
        print(f"# {name}: weights made in {time.perf_counter() - start:.1f} s", flush=True)
        token_bytes = kv_token_bytes(model.config, model.dtype.itemsize)
        sizes = fit_sizes(wanted, token_bytes, usable_bytes(options.device))
        if sizes != wanted:
            deadline.left_out.append(f"{name}: requests beyond {vars(sizes)}: no memory for them")
        results: dict[tuple[str, str], workloads.Result] = {}
        head = {"model": name, "device": options.device}
        for engine in chosen.engines.split(";"):
            new_rows, new_results = run_engine(model, head, engine, sizes, deadline)
            rows += new_rows
            keep(options, "end_to_end", deadline, {"rows": rows, "sizes": vars(wanted)})
            results |= {(engine, workload): one for workload, one in new_results.items()}
        add_comparison(rows, results, name)
        del model
        gc.collect()
    columns = ["model", "workload", "engine", "tokens_per_s", "speedup", "seconds", "peak_kv_gib"]
    columns += ["static_kv_gib", "kv_of_static", "same_tokens", "failed"]
    tables = [table(rows, columns, "end to end, bfloat16, random weights")]
    finish(options, "end_to_end", deadline, tables, {"rows": rows, "sizes": vars(wanted)})
    ours = [row for row in rows if row["engine"].startswith("flexinfer")]
    if any("failed" in row and not row["failed"].startswith("out of time") for row in ours):
        raise SystemExit("FlexInfer failed, see the column `failed`")


if __name__ == "__main__":
    main()
