"""Microseconds of the manager's bookkeeping, as seen from Python; see README.md beside this file.

python benchmarks/manager/bench.py --json FILE [--device host,sim] [--quick]
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

from provenance import write_report
from scenario import NUM_PROMPTS, SETTINGS, Scenario

TARGETS_US = {
    "decode_step_256_us": 25.0,
    "decode_step_256_windows_us": 15.0,
    "match_4096_us": 20.0,
}
ROUNDS, QUICK_ROUNDS = 300, 20
QUICK_PROMPTS = 50


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write the numbers."""
    arguments = _arguments(argv)
    load_before = os.getloadavg()
    results = {name: _measure(name, arguments.quick) for name in arguments.device}
    for name, rows in results.items():
        _print_table(name, rows)
    load = ", ".join(f"{value:.1f}" for value in load_before)
    print(f"load average before: {load} on {os.cpu_count()} cores")
    body = _body(results, arguments.quick)
    write_report(arguments.json, "manager", body, load_before=load_before)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument(
        "--device", type=_devices, default=list(SETTINGS), help="host, sim or host,sim"
    )
    parser.add_argument("--quick", action="store_true", help="few rounds: only to see it work")
    return parser.parse_args(argv)


def _devices(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in SETTINGS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(SETTINGS)}")
    return names


def _measure(name: str, quick: bool) -> dict[str, dict[str, float]]:
    rounds, prompts = (QUICK_ROUNDS, QUICK_PROMPTS) if quick else (ROUNDS, NUM_PROMPTS)
    gc.collect()
    gc.disable()
    try:
        series = Scenario(SETTINGS[name], rounds, prompts).run()
    finally:
        gc.enable()
    return {operation: measured.summary() for operation, measured in series.items()}


def _body(results: dict[str, dict[str, dict[str, float]]], quick: bool) -> dict[str, Any]:
    """Headline medians at the top (of the first device measured), then everything."""
    first = next(iter(results.values()))
    return {
        **{operation: numbers["median_us"] for operation, numbers in first.items()},
        "headline_device": next(iter(results)),
        "devices": results,
        "targets_us": TARGETS_US,
        "quick": quick,
    }


def _print_table(device: str, rows: dict[str, dict[str, float]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"device {device}, microseconds", title_justify="left")
    table.add_column("operation", no_wrap=True)
    for head in ("median", "p10", "p90", "bookkeeping", "driver", "driver share", "target"):
        table.add_column(head, justify="right")
    for operation, numbers in rows.items():
        target = TARGETS_US.get(operation)
        table.add_row(
            operation.removesuffix("_us"),
            *(f"{numbers[key]:.1f}" for key in ("median_us", "p10_us", "p90_us")),
            *(f"{numbers[key]:.1f}" for key in ("bookkeeping_us", "driver_us")),
            f"{100 * numbers['driver_share']:.0f} %",
            f"< {target:.0f}" if target else "",
        )
    Console(width=max(110, Console().width)).print(table)


if __name__ == "__main__":
    main()
