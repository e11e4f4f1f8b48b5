"""What the manager's operations cost as more is cached and parked; see README.md beside this file.

python benchmarks/manager/growth.py --json FILE [--plot FILE.png] [--quick]
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import subprocess
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

from growth_scenario import LAYOUTS, Scenario, metadata_bytes_per_token
from provenance import write_report

CACHED_TOKENS = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
PARKED_CHUNKS = (0, 1_024, 8_192, 65_536)
PATH_NODES = (1, 8, 64)
MAX_RATIO = 1.5
MAX_METADATA_BYTES = 16.0
ROUNDS, QUICK_ROUNDS = 60, 5

Table = dict[str, dict[str, float]]
"""Operation -> column -> microseconds."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print tables, and write the numbers."""
    arguments = _arguments(argv)
    if arguments.layout:
        print(metadata_bytes_per_token(arguments.layout, 200 if arguments.quick else 2_000))
        return
    rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
    cached = CACHED_TOKENS[:2] if arguments.quick else CACHED_TOKENS
    parked = PARKED_CHUNKS[:2] if arguments.quick else PARKED_CHUNKS
    load_before = os.getloadavg()
    gc.disable()
    tables = {
        "cached_tokens": _series(
            rounds, [(f"{n:,}", Scenario(2 * rounds, cached_tokens=n)) for n in cached]
        ),
        "parked_chunks": _series(
            rounds, [(f"{n:,}", Scenario(2 * rounds, parked_chunks=n)) for n in parked]
        ),
        "nodes_on_the_path": _series(
            rounds,
            [(f"{n:,}", Scenario(2 * rounds, path_nodes=n)) for n in PATH_NODES],
            only="match_hit",
        ),
    }
    gc.enable()
    layouts = {name: _metadata(name, arguments.quick) for name in LAYOUTS}
    report = {
        "us": tables,
        "ratio_last_to_first": {name: _ratios(table) for name, table in tables.items()},
        "metadata_bytes_per_token": layouts,
        "bounds": {"ratio": MAX_RATIO, "metadata_bytes_per_token": MAX_METADATA_BYTES},
    }
    _print(report)
    write_report(arguments.json, "manager_growth", report, load_before=load_before)
    if arguments.plot:
        _plot(report, arguments.plot)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--plot", type=Path, help="draw them into this file")
    parser.add_argument("--quick", action="store_true", help="few rounds: only to see it work")
    parser.add_argument("--layout", choices=LAYOUTS, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _series(rounds: int, columns: list[tuple[str, Scenario]], only: str | None = None) -> Table:
    """Each column has a manager of its own; they take turns, so that a machine that slows down for
    a while does so for all of them."""
    opened = [(column, scenario.open()) for column, scenario in columns]
    names = [name for name in opened[0][1] if only in (None, name)]
    values: dict[tuple[str, str], list[float]] = {}
    for name in names:
        for _ in range(rounds):
            for column, operations in opened:
                operations[name]()  # brings what it needs into the caches, as in a busy step
                values.setdefault((name, column), []).append(operations[name]())
    for _, scenario in columns:
        scenario.close()
    return {
        name: {column: round(statistics.median(values[name, column]), 2) for column, _ in columns}
        for name in names
    }


def _ratios(table: Table) -> dict[str, float]:
    return {
        operation: round(list(row.values())[-1] / next(iter(row.values())), 2)
        for operation, row in table.items()
    }


def _metadata(layout: str, quick: bool) -> float:
    """In a process of its own, whose resident set nothing else has grown."""
    command = [sys.executable, __file__, "--layout", layout, *(["--quick"] if quick else [])]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return round(float(done.stdout), 1)


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console(width=110)
    for name, rows in report["us"].items():
        title = f"microseconds by {name.replace('_', ' ')}"
        table = RichTable("operation", title=title, title_justify="left")
        for column in next(iter(rows.values())):
            table.add_column(column, justify="right")
        table.add_column("last : first", justify="right")
        for operation, row in rows.items():
            ratio = report["ratio_last_to_first"][name][operation]
            table.add_row(operation, *(f"{us:.1f}" for us in row.values()), f"{ratio:.2f}")
        console.print(table)
    for layout, num_bytes in report["metadata_bytes_per_token"].items():
        console.print(f"{layout}: {num_bytes:.1f} bytes of metadata per cached token")


def _plot(report: dict[str, Any], file: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for axis, name in zip(axes, ("cached_tokens", "parked_chunks"), strict=True):
        for operation, row in report["us"][name].items():
            axis.plot(list(row), array("d", row.values()), marker="o", label=operation)
        axis.set_yscale("log")
        axis.set_xlabel(name.replace("_", " "))
    axes[0].set_ylabel("µs, median")
    axes[1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    main()
