"""What one tenant's worst does to another's time to the first token; see README.md."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

from attacks import HELLO, NAMES, ORDINARY
from provenance import write_report

HERE = Path(__file__).resolve().parent
VICTIM, ATTACKER = "victim-key", "attacker-key"
BODY = json.dumps({"messages": HELLO, "max_tokens": 4, "ignore_eos": True, "stream": True})
PAUSE_S = 0.01
LIMIT_PERCENT = 20.0
NUM_DRAWS = 400


@contextlib.contextmanager
def serving() -> Iterator[int]:
    """`flexinfer serve` with the shipped model and one thread: the other core is the callers'."""
    command = [sys.executable, "-m", "flexinfer.cli", "serve", "--port", "0", "--threads", "1"]
    keys = {"FLEXINFER_API_KEY": json.dumps([VICTIM, ATTACKER])}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=file, env={**os.environ, **keys}
            )
        try:
            yield _wait_until_ready(process, log)
        finally:
            process.terminate()
            process.wait(60)


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> int:
    """The port."""
    while process.poll() is None:
        if found := re.search(r"Serving \S+ at http://[^:]+:(\d+)", log.read_text()):
            with contextlib.suppress(OSError):
                connection = http.client.HTTPConnection("127.0.0.1", int(found[1]))
                connection.request("GET", "/ready")
                if connection.getresponse().status == 200:
                    return int(found[1])
        time.sleep(0.1)
    raise SystemExit(f"the server has ended:\n{log.read_text()}")


def first_token_times(port: int, seconds: float) -> list[float]:
    """In seconds, of chats one after the other."""
    headers = {"Authorization": f"Bearer {VICTIM}", "Content-Type": "application/json"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    found = []
    end_s = time.perf_counter() + seconds
    while (start_s := time.perf_counter()) < end_s:
        connection.request("POST", "/v1/chat/completions", BODY, headers)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        while b'"content":' not in answer.readline():
            pass
        found.append(time.perf_counter() - start_s)
        answer.read()
        time.sleep(PAUSE_S)
    return found


def under(name: str, port: int, seconds: float, *, sink: bool) -> tuple[list[float], Any]:
    """The victim's times while the attacker attacks the server, or a sink; its answers."""
    command = [sys.executable, str(HERE / "attacker.py"), name, "--port", str(port)]
    command += ["--key", ATTACKER, "--seconds", str(seconds + 1), *(["--sink"] if sink else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it has made what it sends
        time.sleep(0.5)
        times = first_token_times(port, seconds)
        return times, json.loads(process.stdout.read())


def p99(times: list[float]) -> float:
    return statistics.quantiles(times, n=100, method="inclusive")[98]


def measure(name: str, port: int, seconds: float, rounds: int) -> dict[str, Any]:
    """Attack and control in turn, so that both meet the same machine."""
    control: list[float] = []
    attacked: list[float] = []
    pairs, answers = [], None
    for number in range(rounds):
        parts = {}
        for sink in (True, False) if number % 2 == 0 else (False, True):
            parts[sink], said = under(name, port, seconds, sink=sink)
            answers = answers if sink else said
        control += parts[True]
        attacked += parts[False]
        pairs.append([1e3 * p99(parts[True]), 1e3 * p99(parts[False])])
    change = change_percent(control, attacked)
    return {
        "control_ms": summary(control),
        "attacked_ms": summary(attacked),
        "p99_ms_by_round": pairs,
        "p99_change_percent": change,
        "p99_change_interval": interval(control, attacked),
        "holds": None if name == ORDINARY else change <= LIMIT_PERCENT,
        "answers_to_attacker": answers,
    }


def change_percent(control: list[float], attacked: list[float]) -> float:
    return 100 * (p99(attacked) / p99(control) - 1)


def interval(control: list[float], attacked: list[float]) -> list[float]:
    """Of the change, in percent: nine in ten of the changes that samples of these times have,
    drawn with replacement (the bootstrap's percentiles)."""
    draw = random.Random(0)
    changes = [
        change_percent(
            draw.choices(control, k=len(control)), draw.choices(attacked, k=len(attacked))
        )
        for _ in range(NUM_DRAWS)
    ]
    cuts = statistics.quantiles(changes, n=20)
    return [cuts[0], cuts[-1]]


def summary(times: list[float]) -> dict[str, float]:
    ms = sorted(1e3 * one for one in times)
    return {
        "requests": len(ms),
        "p50": statistics.median(ms),
        "p99": 1e3 * p99(times),
        "max": ms[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attack", choices=NAMES, action="append", help="default: all")
    parser.add_argument("--seconds", type=float, default=8.0, help="of one measurement")
    parser.add_argument("--rounds", type=int, default=1, help="pairs of attack and control")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    load = [round(one, 1) for one in os.getloadavg()]
    result: dict[str, Any] = {"limit_percent": LIMIT_PERCENT}
    with serving() as port:
        first_token_times(port, 2)  # a warm-up
        result["alone_ms"] = summary(first_token_times(port, args.seconds))
        result["attacks"] = {}
        for name in args.attack or NAMES:
            result["attacks"][name] = found = measure(name, port, args.seconds, args.rounds)
            low, high = found["p99_change_interval"]
            change = f"{found['p99_change_percent']:+.0f} % ({low:+.0f} to {high:+.0f})"
            print(f"{name}: p99 {change}", file=sys.stderr, flush=True)
    if ORDINARY in result["attacks"]:
        beside = result["attacks"][ORDINARY]["attacked_ms"]["p99"]
        for found in result["attacks"].values():
            found["p99_over_ordinary_percent"] = 100 * (found["attacked_ms"]["p99"] / beside - 1)
    print(json.dumps(result, indent=1))
    write_report(args.json, "isolation", result, load_before=load)


if __name__ == "__main__":
    main()
