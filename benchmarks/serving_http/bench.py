"""What HTTP costs: tokens a second of `flexinfer serve` against the offline engine and a peer.

    python benchmarks/serving_http/bench.py [--json FILE] [--quick]
    python benchmarks/serving_http/bench.py --vllm-python .../bin/python --vllm-preload LIB:LIB

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import load
from peers import Peer, peers_of
from processes import Offline, Server, busy_cpu_s
from text_model import make_text_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu_common"))

import workloads  # text_model.py has its folder in the path
from harness import table
from provenance import write_report

Row = dict[str, Any]
MAX_MODEL_LEN = 2048
MAX_NUM_SEQS = 64
KV_GIB = 1
ENGINE_THREAD = "flexinfer-engin"
"""Of `flexinfer serve`, as /proc has it: 15 characters."""
QUICK_SCALE = 8
"""A quick run has this part of the requests."""
OURS = ("serve, stream", "serve, each token", "serve, whole")
COLUMNS = (
    "target",
    "tokens_per_s",
    "lowest",
    "highest",
    "overhead_percent",
    "overhead_less_load_percent",
    "same_text_percent",
    "cpu_ms_per_token",
    "cpu_overhead_percent",
    "engine_cpu_ms_per_token",
    "http_cpu_ms_per_token",
    "load_cpu_ms_per_token",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "itl_p50_ms",
    "itl_p99_ms",
    "peak_mib",
    "others_percent",
)


def prompts_of(workload: str, seed: int, repetition: int | str, scale: int) -> Any:
    """(prompts, number of new tokens) of one round of benchmarks/serving's workload."""
    rounds = []

    def note(prompts: workloads.Prompts, num_new: int) -> workloads.Prompts:
        rounds.append((prompts, num_new))
        return [[0] * num_new for _ in prompts]

    workloads.run(workload, note, seed, repetition, scale)
    return rounds[0]


def run_offline(engine: Offline, prompts: workloads.Prompts, num_new: int) -> Row:
    before_s, before_engine_s, busy_s = engine.cpu_s(), engine.thread_cpu_s(), busy_cpu_s()
    answer = engine.generate(prompts, num_new)
    others_s = busy_cpu_s() - busy_s - (engine.cpu_s() - before_s)
    return {
        "target": "offline",
        "seconds": answer["seconds"],
        "num_new_tokens": answer["num_new_tokens"],
        "cpu_s": engine.cpu_s() - before_s,
        "engine_cpu_s": engine.thread_cpu_s() - before_engine_s,
        "others_percent": others_percent(others_s, answer["seconds"]),
        "peak_mib": engine.peak_mib(),
        "texts": answer["texts"],
    }


def run_http(
    target: str,
    server: Server,
    prompts: workloads.Prompts,
    num_new: int,
    salt: str,
    options: dict[str, Any] | None = None,
) -> Row:
    """`target` ends with "whole" for answers that are not streamed; `options`: of requests."""
    before_s, busy_s = server.cpu_s(), busy_cpu_s()
    before_http_s, before_engine_s = server.thread_cpu_s(), server.thread_cpu_s(ENGINE_THREAD)
    answers = load.send(
        server.url,
        server.model,
        prompts,
        num_new,
        stream=not target.endswith("whole"),
        salt=f"{target} {salt}",
        options=options or {},
    )
    cpu_s = server.cpu_s() - before_s
    others_s = busy_cpu_s() - busy_s - cpu_s - answers.load_cpu_s
    return {
        "target": target,
        "seconds": answers.seconds,
        "num_new_tokens": answers.num_new_tokens,
        "cpu_s": cpu_s,
        "others_percent": others_percent(others_s, answers.seconds),
        "http_cpu_s": server.thread_cpu_s() - before_http_s,
        "engine_cpu_s": server.thread_cpu_s(ENGINE_THREAD) - before_engine_s,
        "load_cpu_s": answers.load_cpu_s,
        "peak_mib": server.peak_mib(),
        "texts": answers.texts,
        **answers.latencies_ms,
    }


def others_percent(cpu_s: float, seconds: float) -> float:
    """What other processes took of the machine; where it is much, the times say little."""
    return max(0.0, 100 * cpu_s / (seconds * (os.cpu_count() or 1)))


def measure(args: argparse.Namespace, model: Path, logs: Path) -> list[Row]:
    """One row a target and repetition. FlexInfer's targets take turns; then each peer alone."""
    threads = {"OMP_NUM_THREADS": str(args.threads), "MKL_NUM_THREADS": str(args.threads)}
    scale = QUICK_SCALE if args.quick else 1
    rows: list[Row] = []
    with ExitStack() as stack:
        kv_bytes = str(KV_GIB << 30)
        sizes = [str(model), args.dtype, str(MAX_MODEL_LEN), str(MAX_NUM_SEQS), kv_bytes]
        offline = stack.enter_context(Offline(sizes, threads, logs / "offline.log"))
        server, exact = (
            stack.enter_context(
                Server(flexinfer_command(args, model, interval), threads, logs / name)
            )
            for interval, name in ((None, "flexinfer.log"), (1, "flexinfer-1.log"))
        )
        for repetition in ["warm-up", *range(args.repetitions)]:
            is_warm_up = repetition == "warm-up"
            asked = prompts_of(args.workload, args.seed, repetition, scale)
            salt = str(repetition)
            runs = {"offline": partial(run_offline, offline, *asked)}
            for name, at in zip(OURS, (server, exact, server), strict=True):
                runs[name] = partial(run_http, name, at, *asked, salt)
            found = {name: runs[name]() for name in rotated(list(runs), repetition)}
            done = [found[name] for name in runs]
            compare(done)
            if not is_warm_up:
                rows += [row | {"repetition": repetition} for row in done]
    for peer in peers_of(args, model, MAX_MODEL_LEN, MAX_NUM_SEQS, KV_GIB):
        rows += measure_peer(args, peer, logs, scale)
    return rows


def rotated(names: list[str], repetition: int | str) -> list[str]:
    """Each repetition begins with another target: the machine's speed drifts."""
    first = repetition % len(names) if isinstance(repetition, int) else 0
    return names[first:] + names[:first]


def measure_peer(args: argparse.Namespace, peer: Peer, logs: Path, scale: int) -> list[Row]:
    """A peer's server; ours is down meanwhile. No rows, and a word why, if it fails."""
    try:
        with Server(peer.command, peer.variables, logs / f"{peer.name}.log") as server:
            return run_peer(args, peer, server, scale)
    except RuntimeError as error:
        print(f"{peer.name}: {error}", file=sys.stderr)
        return []


def run_peer(args: argparse.Namespace, peer: Peer, server: Server, scale: int) -> list[Row]:
    rows = []
    warm_up = prompts_of(args.workload, args.seed, "warm-up", scale)
    run_http(f"{peer.name}, stream", server, *warm_up, "warm-up", peer.options)
    for repetition in range(args.repetitions):
        asked = prompts_of(args.workload, args.seed, repetition, scale)
        for target in (f"{peer.name}, stream", f"{peer.name}, whole"):
            row = run_http(target, server, *asked, str(repetition), peer.options)
            del row["http_cpu_s"], row["engine_cpu_s"]  # divided otherwise there
            rows.append(row | {"repetition": repetition})
    return rows


def flexinfer_command(
    args: argparse.Namespace, model: Path, stream_interval: int | None
) -> list[str]:
    command = [sys.executable, "-m", "flexinfer.cli", "serve", str(model), "--dtype", args.dtype]
    command += ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS)]
    if stream_interval is not None:
        command += ["--stream-interval", str(stream_interval)]
    return [*command, "--kv-cache-memory-bytes", str(KV_GIB << 30), "--port"]


def compare(rows: list[Row]) -> None:
    """Adds overhead and agreement with the first row, the offline engine's, of one repetition."""
    reference = rows[0]
    for row in rows[1:]:
        rate = row["num_new_tokens"] / row["seconds"]
        offline_rate = reference["num_new_tokens"] / reference["seconds"]
        row["overhead_percent"] = 100 * (1 - rate / offline_rate)
        # At least this much of the time was the load generator's, if nothing ever waited.
        server_s = row["seconds"] - row["load_cpu_s"] / (os.cpu_count() or 1)
        server_rate = row["num_new_tokens"] / server_s
        cpu_s_per_token = row["cpu_s"] / row["num_new_tokens"]
        offline_cpu_s = reference["cpu_s"] / reference["num_new_tokens"]
        row["cpu_overhead_percent"] = 100 * (cpu_s_per_token / offline_cpu_s - 1)
        row["overhead_less_load_percent"] = 100 * (1 - server_rate / offline_rate)
        pairs = list(zip(row["texts"], reference["texts"], strict=True))
        row["same_text_percent"] = 100 * sum(a == b for a, b in pairs) / len(pairs)


def summarise(rows: list[Row]) -> list[Row]:
    """A row a target: medians over its repetitions, of the overheads too."""
    summary = []
    for target in dict.fromkeys(row["target"] for row in rows):
        mine = [row for row in rows if row["target"] == target]
        rates = [row["num_new_tokens"] / row["seconds"] for row in mine]
        out: Row = {"target": target, "tokens_per_s": statistics.median(rates)}
        out |= {"lowest": min(rates), "highest": max(rates)}
        for name in mine[0]:
            if name.endswith(("_ms", "_percent")):
                out[name] = statistics.median(row[name] for row in mine)
            elif name.endswith("cpu_s"):
                each = [1e3 * row[name] / row["num_new_tokens"] for row in mine]
                out[name.replace("cpu_s", "cpu_ms_per_token")] = statistics.median(each)
        out["peak_mib"] = max(row["peak_mib"] for row in mine)
        summary.append({name: _rounded(value) for name, value in out.items()})
    return summary


def _rounded(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default=None, help="of benchmarks/serving/models.py")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--workload", default="mixed", choices=("mixed", "prefix"))
    parser.add_argument("--repetitions", type=int, default=None)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--models", type=Path, default=Path("build/bench/text_models"))
    parser.add_argument("--vllm-python", type=Path, help="Python that has a CPU build of vLLM")
    parser.add_argument("--vllm-preload", default="", help="LD_PRELOAD for it")
    parser.add_argument("--vllm-args", default="--enforce-eager --disable-log-stats")
    parser.add_argument("--llama-server", type=Path, help="binary of llama.cpp's server")
    parser.add_argument("--llama-model", type=Path, help="the same model as GGUF, for it")
    parser.add_argument("--quick", action="store_true", help="toy sizes, only to see it work")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    args = parser.parse_args()
    args.size = args.size or ("tiny" if args.quick else "small")
    args.repetitions = args.repetitions or (1 if args.quick else 3)
    return args


def main() -> None:
    args = parse()
    load_before = round(os.getloadavg()[0], 2)
    model = make_text_model(args.models, args.size)
    with tempfile.TemporaryDirectory(prefix="serving_http-") as logs:
        rows = measure(args, model, Path(logs))
    summary = summarise(rows)
    print(f"{args.size}, {args.dtype}, {args.workload}, {args.threads} threads")
    print(table(summary, COLUMNS))
    for row in rows:
        del row["texts"]
    settings = {name: str(value) for name, value in vars(args).items() if name != "json"}
    body = {"settings": settings, "summary": summary, "rows": rows}
    write_report(args.json, "serving_http", body, load_before=load_before)


if __name__ == "__main__":
    main()
