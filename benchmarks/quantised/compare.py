"""Quantised weights against llama.cpp's, one round an invocation; see README.md beside this file.

python benchmarks/quantised/compare.py --llama-bin DIR --json FILE [--shape 7b --ways int4]

Rounds that are in the file already count too, and the medians are taken anew.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "serving_http"))

import httpx
from load import NUM_BATCH, NUM_NEW, NUM_PROMPT, REPETITIONS, prompts_of
from model import AT_LOAD, KINDS, OWN_FILES, SHAPES, make_model, opened_as
from processes import Server
from provenance import write_report

HERE = Path(__file__).resolve().parent
MEASURES = ("decode", "prefill", "batch")
Round = dict[str, dict[str, Any]]
"""Of each engine and way, tokens a second of each measure, several times each."""


def main(argv: Sequence[str] | None = None) -> None:
    """Make the model if need be, run one round, print all rounds' medians, write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--llama-bin", type=Path, required=True, help="where llama-bench is")
    parser.add_argument("--json", type=Path, required=True, help="the numbers, kept and added to")
    parser.add_argument("--folder", type=Path, default=Path("build/quantised"), help="for models")
    parser.add_argument("--shape", choices=(*SHAPES, *OWN_FILES), default="1b")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument(
        "--files", type=Path, help="a folder with KIND.gguf of another model, in a shape's place"
    )
    parser.add_argument("--ways", default=",".join(AT_LOAD), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--measures", default=",".join(MEASURES))
    parser.add_argument(
        "--clock",
        choices=("wall", "processor"),
        default="wall",
        help="processor: for one thread on a machine where others work, too; not for batch",
    )
    arguments = parser.parse_args(argv)
    if arguments.clock == "processor" and (arguments.threads, "batch" in arguments.measures) != (
        1,
        False,
    ):
        parser.error("the processor's time is compared of one thread, without batch")
    kinds = {way: KINDS[way] for way in arguments.ways.split(",")}
    folder = arguments.files or make_model(
        arguments.folder, arguments.shape, arguments.layers, list(kinds), arguments.llama_bin
    )
    rounds = _rounds_in(arguments.json)
    with ExitStack() as stack:
        threads, clock = arguments.threads, arguments.clock
        ours = {way: stack.enter_context(Ours(folder, way, threads, clock)) for way in kinds}
        load_before = os.getloadavg()
        found: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds")}
        for way, kind in kinds.items():
            sides: dict[str, Callable[[str], Any]] = {
                f"flexinfer {way}": ours[way].measure,
                f"llama.cpp {kind}": partial(_llama, folder / f"{kind}.gguf", arguments),
            }
            # Who is first takes turns: a machine's speed changes in minutes.
            order = list(sides) if len(rounds) % 2 == 0 else list(sides)[::-1]
            for measure in arguments.measures.split(","):
                for side in order:
                    # Two of our ways may have one of theirs beside them: measured beside each.
                    seen = found.setdefault(side, {}).setdefault(measure, [])
                    seen.extend(sides[side](measure))
            found[f"flexinfer {way}"] |= ours[way].measure("memory") | ours[way].loaded
    rounds.append(found)
    table = _table(rounds)
    _show(table)
    files = arguments.files and arguments.files.name
    model = {"shape": files or arguments.shape, "layers": arguments.layers}
    body = {**model, "medians": table, "rounds": rounds}
    write_report(arguments.json, "quantised", body, load_before=load_before)


def _rounds_in(path: Path) -> list[Round]:
    return json.loads(path.read_text())["rounds"] if path.exists() else []


class Ours:
    """A process with the model loaded, for the time of a `with`."""

    def __init__(self, folder: Path, way: str, threads: int, clock: str) -> None:
        """It begins to load."""
        model, quantization = opened_as(folder, way)
        self._process = subprocess.Popen(
            [sys.executable, HERE / "ours.py", model, quantization, str(threads), clock],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.loaded: dict[str, float] = {}

    def __enter__(self) -> Ours:
        self.loaded = self._read()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def measure(self, name: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("FlexInfer's process has ended")
        return json.loads(line)


def _llama(model: Path, arguments: argparse.Namespace, measure: str) -> list[float]:
    if measure == "batch":
        return [_serve_batch(model, arguments)]
    option, count = ("-n", NUM_NEW) if measure == "decode" else ("-p", NUM_PROMPT)
    if arguments.clock == "wall":
        return _bench(model, arguments, option, count)[0]
    rates = []
    for _ in range(REPETITIONS):
        # What loading takes falls out of the difference.
        seconds = [_bench(model, arguments, option, n)[1] for n in (count // 2, count + count // 2)]
        rates.append(count / (seconds[1] - seconds[0]))
    return rates


def _bench(
    model: Path, arguments: argparse.Namespace, option: str, count: int
) -> tuple[list[float], float]:
    """Tokens a second of each repetition, by llama-bench, and the processor's time for it all."""
    command = [arguments.llama_bin / "llama-bench", "-m", model, "-t", str(arguments.threads)]
    other = "-p" if option == "-n" else "-n"
    options = ["-fa", "on", "-o", "json", option, str(count), other, "0"]
    options += ["-r", str(REPETITIONS)] if arguments.clock == "wall" else ["-r", "1", "--no-warmup"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([*command, *options], check=True, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    samples: list[float] = json.loads(done.stdout)[0]["samples_ts"]
    return samples, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _serve_batch(model: Path, arguments: argparse.Namespace) -> float:
    """Tokens a second of all requests at once, by llama-server."""
    count, length, num_new = NUM_BATCH
    body = {"n_predict": num_new, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
    threads = str(arguments.threads)
    command = [str(arguments.llama_bin / "llama-server"), "-m", str(model), "--host", "127.0.0.1"]
    command += ["-t", threads, "-tb", threads, "-np", str(count), "-c", str(count * 128), "-cb"]
    command += ["-fa", "on", "--kv-unified", "--offline", "--no-webui", "--port"]
    with (
        Server(command, {}, model.with_suffix(".log")) as server,
        httpx.Client(timeout=150) as client,
    ):

        def ask(prompt: list[int]) -> int:
            answer = client.post(f"{server.url}/completion", json={"prompt": prompt, **body})
            return int(answer.raise_for_status().json()["tokens_predicted"])

        with ThreadPoolExecutor(count) as pool:
            list(pool.map(ask, prompts_of(2, 8)))
            begun = time.perf_counter()
            num_tokens = sum(pool.map(ask, prompts_of(count, length)))
            seconds = time.perf_counter() - begun
    if num_tokens != count * num_new:
        raise RuntimeError(f"llama-server gave {num_tokens} tokens of {count * num_new}")
    return num_tokens / seconds


def _table(rounds: list[Round]) -> dict[str, Any]:
    """Medians of the rounds' medians, and the ratio to llama.cpp of each round."""
    table: dict[str, Any] = {}
    for way, kind in KINDS.items():
        for measure in MEASURES:
            pairs = [
                (statistics.median(ours), statistics.median(theirs))
                for one in rounds
                if (ours := one.get(f"flexinfer {way}", {}).get(measure))
                and (theirs := one.get(f"llama.cpp {kind}", {}).get(measure))
            ]
            if pairs:
                ratios = sorted(ours / theirs for ours, theirs in pairs)
                table[f"{measure} {way}"] = {
                    "flexinfer": statistics.median(ours for ours, _ in pairs),
                    "llama.cpp": statistics.median(theirs for _, theirs in pairs),
                    "ratio": statistics.median(ratios),
                    "ratios": ratios,
                }
    return table


def _show(table: dict[str, Any]) -> None:
    print("| | FlexInfer | llama.cpp | ratio |\n|---|---|---|---|")
    for name, row in table.items():
        low, high = row["ratios"][0], row["ratios"][-1]
        print(
            f"| {name} | {row['flexinfer']:.1f} | {row['llama.cpp']:.1f} | "
            f"{row['ratio']:.2f} ({low:.2f} to {high:.2f}) |"
        )


if __name__ == "__main__":
    main()
