"""Two servers as they come, under vLLM's own load generator: `vllm bench serve`, in turns.

    python benchmarks/serving_http/defaults.py --vllm-python VENV/bin/python \\
        --vllm-preload libtcmalloc_minimal.so.4:VENV/lib/libiomp5.so [--rounds 5] [--json FILE]

Sampling is the servers' default: at random, temperature 1. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from processes import HERE, Measured, Server, busy_cpu_s
from text_model import make_text_model

sys.path.insert(0, str(HERE.parent / "gpu_common"))
sys.path.insert(0, str(HERE.parent / "common"))

from harness import table
from provenance import write_report

Row = dict[str, Any]
LATENCIES = ("ttft", "tpot", "itl", "e2el")
COLUMNS = (
    "prompts",
    "server",
    "tokens_per_s",
    "lowest",
    "highest",
    "ratio",
    "p50_ttft_ms",
    "p99_ttft_ms",
    "p50_tpot_ms",
    "p99_itl_ms",
    "cpu_ms_per_token",
    "others_percent",
)
NUM_TEXT_CHARS = 700
"""Of Python sources: some 256 tokens of the model's tokenizer."""


class Generator(Measured):
    """vLLM's load generator: vllm_load.py in vLLM's environment."""

    def __init__(self, python: Path, log: Path) -> None:
        command = [str(python), str(HERE / "vllm_load.py")]
        quiet = {"VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 1}
        super().__init__(command, quiet, log, **pipes)
        self._answer("ready")

    def run(self, arguments: list[str]) -> Row:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(arguments) + "\n")
        result: Row = json.loads(self._answer("{"))
        if result["failed"]:
            raise self.fail(f"{result['failed']} requests have failed")
        return result

    def _answer(self, start: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(start):
                return line
        raise self.fail("vLLM's load generator has ended")


def server_commands(
    args: argparse.Namespace, model: Path
) -> tuple[list[str], list[str], dict[str, str]]:
    """Ours, vLLM's, and vLLM's environment; --port is to be added."""
    shared = [str(model), "--dtype", args.dtype, "--host", "127.0.0.1", *args.both_args.split()]
    ours = [sys.executable, "-m", "flexinfer.cli", "serve", *shared, *args.our_args.split()]
    vllm = [str(args.vllm_python), "-m", "vllm.entrypoints.openai.api_server", "--model", *shared]
    vllm += args.vllm_args.split()
    settings = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    settings |= {"VLLM_CPU_OMP_THREADS_BIND": f"0-{args.threads - 1}", "HF_HUB_OFFLINE": "1"}
    if args.vllm_preload:
        settings["LD_PRELOAD"] = args.vllm_preload
    return ours, vllm, settings


def measure(args: argparse.Namespace, model: Path, folder: Path) -> list[Row]:
    """One row a kind of prompts, round and server; both servers are up, and one idles."""
    ours, vllm, settings = server_commands(args, model)
    rows: list[Row] = []
    with (
        Server([*ours, "--port"], {}, folder / "flexinfer.log") as flexinfer,
        Server([*vllm, "--port"], settings, folder / "vllm.log") as peer,
        Generator(args.vllm_python, folder / "generator.log") as generator,
    ):
        servers = {"flexinfer": flexinfer, "vllm": peer}
        for round_idx in range(-args.warm_ups, args.rounds):
            order = list(servers) if round_idx % 2 else list(servers)[::-1]
            for kind in args.prompts.split(","):
                prompts = prompt_arguments(args, kind, round_idx, folder)
                for name in order:
                    time.sleep(args.pause)
                    row = run(args, generator, servers[name], model, prompts)
                    rows.append({"round": round_idx, "prompts": kind, "server": name, **row})
                    print(json.dumps(rows[-1]), flush=True)
    return rows


def prompt_arguments(
    args: argparse.Namespace, kind: str, round_idx: int, folder: Path
) -> list[str]:
    """Both servers get the same prompts, other ones each round: nothing of them is cached."""
    seed = ["--seed", str(args.seed + round_idx)]
    if kind == "random":
        lengths = ["--random-input-len", "256", "--random-output-len", "64"]
        return ["--dataset-name", "random", *lengths, *seed]
    path = folder / f"text-{round_idx}.jsonl"
    texts = source_texts(args.num_prompts, args.warm_ups + round_idx)
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    lengths = ["--custom-output-len", "64", "--skip-chat-template"]
    return ["--dataset-name", "custom", "--dataset-path", str(path), *lengths, *seed]


def source_texts(count: int, turn: int) -> list[str]:
    """`count` pieces of the standard library's sources that no other turn has."""
    folder = Path(os.__file__).parent
    text = "".join(path.read_text(errors="replace") for path in sorted(folder.glob("*.py")))
    starts = range(turn * count * NUM_TEXT_CHARS, len(text), NUM_TEXT_CHARS)
    return [text[start : start + NUM_TEXT_CHARS] for start in starts[:count]]


def run(
    args: argparse.Namespace,
    generator: Generator,
    server: Server,
    model: Path,
    prompts: list[str],
) -> Row:
    before_s, generator_s, busy_s = server.cpu_s(), generator.cpu_s(), busy_cpu_s()
    start_s = time.monotonic()
    result = generator.run(
        [
            *("--model", server.model, "--tokenizer", str(model), "--base-url", server.url),
            *("--num-prompts", str(args.num_prompts), "--max-concurrency", str(args.concurrency)),
            *("--ignore-eos", "--disable-tqdm", "--metric-percentiles", "50,99"),
            *("--percentile-metrics", ",".join(LATENCIES)),
            *prompts,
            *args.load_args.split(),
        ]
    )
    seconds, cpu_s = time.monotonic() - start_s, server.cpu_s() - before_s
    others_s = busy_cpu_s() - busy_s - cpu_s - (generator.cpu_s() - generator_s)
    latencies = [f"p{p}_{name}_ms" for name in LATENCIES for p in (50, 99)]
    return {
        "tokens_per_s": result["output_throughput"],
        "num_input_tokens": result["total_input_tokens"],
        "num_new_tokens": result["total_output_tokens"],
        **{name: result[name] for name in latencies},
        "cpu_ms_per_token": 1e3 * cpu_s / result["total_output_tokens"],
        "others_percent": max(0.0, 100 * others_s / (seconds * (os.cpu_count() or 1))),
    }


def summarise(rows: list[Row]) -> list[Row]:
    """Medians over the rounds that count; ratio: of tokens a second to vLLM's, round by round."""
    summary = []
    counted = [row for row in rows if row["round"] >= 0]
    for kind, name in dict.fromkeys((row["prompts"], row["server"]) for row in counted):
        mine = [row for row in counted if (row["prompts"], row["server"]) == (kind, name)]
        peers = [row for row in counted if (row["prompts"], row["server"]) == (kind, "vllm")]
        rates = [row["tokens_per_s"] for row in mine]
        ratios = [a / b["tokens_per_s"] for a, b in zip(rates, peers, strict=True)]
        out: Row = {"prompts": kind, "server": name, "lowest": min(rates), "highest": max(rates)}
        out["ratio"], out["ratios"] = statistics.median(ratios), sorted(ratios)
        for column in mine[0]:
            if column.endswith(("_ms", "_per_s", "_percent", "_per_token")):
                out[column] = statistics.median(row[column] for row in mine)
        summary.append(out)
    return summary


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--size", default="small", help="of benchmarks/serving/models.py")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", default="random,text", help="kinds, of these two")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-ups", type=int, default=1, help="rounds before, told apart")
    parser.add_argument("--num-prompts", type=int, default=96, help="in one round")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument(
        "--pause",
        type=float,
        default=2.0,
        help="seconds before a run: what a server does once idle",
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of vLLM")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--models", type=Path, default=Path("build/bench/text_models"))
    parser.add_argument("--vllm-python", type=Path, required=True)
    parser.add_argument("--vllm-preload", default="", help="LD_PRELOAD for vLLM's server")
    parser.add_argument("--vllm-args", default="", help="for vLLM's server")
    parser.add_argument("--our-args", default="", help="for `flexinfer serve`")
    parser.add_argument("--both-args", default="", help="for both servers")
    parser.add_argument("--load-args", default="", help="such as --temperature=0")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    return parser


def vllm_version(python: Path) -> str:
    code = "import importlib.metadata as m; print(m.version('vllm-cpu'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()


def main() -> None:
    args = arguments((__doc__ or "").splitlines()[0]).parse_args()
    load_before = [round(value, 1) for value in os.getloadavg()]
    model = make_text_model(args.models, args.size).absolute()
    with tempfile.TemporaryDirectory(prefix="serving_http-") as folder:
        rows = measure(args, model, Path(folder))
    summary = summarise(rows)
    print(table(summary, COLUMNS))
    settings = {name: str(value) for name, value in vars(args).items() if name != "json"}
    body = {"settings": settings, "summary": summary, "rows": rows}
    version = vllm_version(args.vllm_python)
    write_report(args.json, "serving_http defaults", body, load_before=load_before, vllm=version)


if __name__ == "__main__":
    main()
