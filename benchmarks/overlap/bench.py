"""Step latency with mapping ahead of the kernels and without; see README.md beside this file.

python benchmarks/overlap/bench.py --json FILE [--setting NAME,...] [--quick]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

from provenance import write_report
from scenario import MODES, SETTINGS, Run, run

TARGET_EXPOSED_RATIO = 50.0
TARGET_P99_RATIO = 1.02
WITH_PRE_EXTENSION = ("on", "on+eager")
NUM_STEPS, NUM_WARM_UP, ROUNDS = 200, 50, 3


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write the numbers."""
    arguments = _arguments(argv)
    load_before = os.getloadavg()
    results = {name: _measure(name, arguments.quick) for name in arguments.setting}
    for name, modes in results.items():
        _print_table(name, modes)
    load = ", ".join(f"{value:.1f}" for value in load_before)
    print(f"load average before: {load} on {os.cpu_count()} cores")
    body = _body(results, arguments.quick)
    write_report(arguments.json, "overlap", body, load_before=load_before)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--setting", type=_names, default=list(SETTINGS), help="one or more, by ,")
    parser.add_argument("--quick", action="store_true", help="few steps: only to see it work")
    return parser.parse_args(argv)


def _names(text: str) -> list[str]:
    for name in text.split(","):
        if name not in SETTINGS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(SETTINGS)}")
    return text.split(",")


def _measure(name: str, quick: bool) -> dict[str, dict[str, float]]:
    """All modes in turn, several rounds, so that a busy minute spoils none of them alone."""
    num_steps, num_warm_up, rounds = (20, 5, 1) if quick else (NUM_STEPS, NUM_WARM_UP, ROUNDS)
    runs: dict[str, list[Run]] = {mode: [] for mode in MODES}
    for seed in range(rounds):
        for mode in MODES:
            runs[mode].append(run(SETTINGS[name], mode, num_steps, num_warm_up, seed))
    return {mode: _numbers(runs[mode]) for mode in MODES}


def _numbers(runs: Sequence[Run]) -> dict[str, float]:
    latencies = sorted(value for one in runs for value in one.latencies_us)
    steps = [step for one in runs for step in one.steps]
    return {
        "p50_us": _percentile(latencies, 0.50),
        "p99_us": _percentile(latencies, 0.99),
        "max_us": latencies[-1],
        "exposed_us_per_step": mean(step.map_us_exposed for step in steps),
        "exposed_us_max": max(step.map_us_exposed for step in steps),
        "hidden_us_per_step": mean(step.map_us_hidden for step in steps),
        "rows_pre_extended": sum(step.rows_pre_extended for step in steps),
        "steps": len(steps),
        "depth_tokens": max(one.depth_tokens for one in runs),
    }


def _percentile(ordered: Sequence[float], fraction: float) -> float:
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


def _verdict(modes: dict[str, dict[str, float]], mode: str) -> dict[str, Any]:
    """Exposed time without / with pre-extension, and p99 with it / fully pre-mapped."""
    without = modes["off"]["exposed_us_per_step"]
    exposed = modes[mode]["exposed_us_per_step"]
    ratio = None if exposed == 0 else without / exposed  # None: nothing was exposed at all
    p99_ratio = modes[mode]["p99_us"] / modes["pre-mapped"]["p99_us"]
    return {
        "exposed_ratio": ratio,
        "p99_ratio": p99_ratio,
        "exposed_ok": without > 0 and (ratio is None or ratio >= TARGET_EXPOSED_RATIO),
        "p99_ok": p99_ratio <= TARGET_P99_RATIO,
    }


def _print_table(name: str, modes: dict[str, dict[str, float]]) -> None:
    kernel_us = SETTINGS[name].kernel_s * 1e6
    print(f"\n{name}: {SETTINGS[name].num_requests} requests, a kernel of {kernel_us:.0f} us")
    print(f"{'':12}{'p50':>10}{'p99':>10}{'max':>10}{'exposed':>10}{'hidden':>10}{'depth':>8}")
    for mode, row in modes.items():
        print(
            f"{mode:12}{row['p50_us']:10.0f}{row['p99_us']:10.0f}{row['max_us']:10.0f}"
            f"{row['exposed_us_per_step']:10.1f}{row['hidden_us_per_step']:10.1f}"
            f"{row['depth_tokens']:8.0f}"
        )
    for mode in WITH_PRE_EXTENSION:
        _print_verdict(mode, _verdict(modes, mode))


def _print_verdict(mode: str, verdict: dict[str, Any]) -> None:
    ratio = verdict["exposed_ratio"]
    times = "nothing is left" if ratio is None else f"{ratio:.0f} times smaller"
    print(
        f"{mode:12}exposed: {times}, target {TARGET_EXPOSED_RATIO:.0f}x: "
        f"{_said(verdict['exposed_ok'])}; p99 / pre-mapped: {verdict['p99_ratio']:.3f}, target "
        f"{TARGET_P99_RATIO:.2f}: {_said(verdict['p99_ok'])}"
    )


def _said(ok: bool) -> str:
    return "ok" if ok else "MISSED"


def _body(results: dict[str, dict[str, dict[str, float]]], quick: bool) -> dict[str, Any]:
    return {
        "quick": quick,
        "settings": {
            name: {
                "modes": modes,
                "verdicts": {mode: _verdict(modes, mode) for mode in WITH_PRE_EXTENSION},
            }
            for name, modes in results.items()
        },
    }


if __name__ == "__main__":
    main()
