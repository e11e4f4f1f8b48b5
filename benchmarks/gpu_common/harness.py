"""What the GPU benchmarks share: options, a deadline, the machine in words, tables and JSON."""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import provenance

Row = dict[str, Any]
environment = functools.cache(provenance.environment)


def parse(doc: str | None, argv: Sequence[str] | None, seconds: float) -> argparse.Namespace:
    """The options that all GPU benchmarks have.

    Without a GPU the device is the CPU and the sizes are small: that shows that the benchmark
    works and measures nothing worth quoting.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda where there is one"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, only to see it work")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument(
        "--seconds",
        type=float,
        default=seconds,
        help="stop measuring after so long; what was left out is listed (default %(default)s)",
    )
    options = parser.parse_args(argv)
    options.device = options.device or default_device()
    options.quick = options.quick or options.device == "cpu"
    return options


def default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class Deadline:
    """Time that a benchmark may take, and what it left out for want of it."""

    seconds: float
    start_s: float = field(default_factory=time.monotonic)
    left_out: list[str] = field(default_factory=list)

    @property
    def remaining_s(self) -> float:
        return self.seconds - (time.monotonic() - self.start_s)

    def passed(self, what: str) -> bool:
        """Whether it is over; then `what` is listed as left out."""
        if self.remaining_s > 0:
            return False
        self.left_out.append(what)
        return True


def table(rows: Sequence[Row], columns: Sequence[str], title: str = "") -> str:
    """Rows as text, one line each; numbers to the right, missing values as a dash."""
    cells = [list(columns), *([text(row.get(name)) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    numeric = [
        all(isinstance(row.get(name), (int, float, type(None))) for row in rows) for name in columns
    ]
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(([title] if title else []) + lines) + "\n"


def text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def finish(
    options: argparse.Namespace, name: str, deadline: Deadline, tables: Sequence[str], body: Row
) -> None:
    """Print tables and what was left out; write the JSON, `body` being the benchmark's part."""
    for one in tables:
        print(one)
    for what in deadline.left_out:
        print(f"left out after {deadline.seconds:.0f} s: {what}")
    keep(options, name, deadline, body, complete=True)
    if options.json:
        print(f"numbers: {options.json}")


def keep(
    options: argparse.Namespace, name: str, deadline: Deadline, body: Row, *, complete: bool = False
) -> None:
    """Write the JSON as far as it is known: a benchmark that is ended by force loses nothing."""
    if options.json is None:
        return
    report = {
        "benchmark": name,
        "device": options.device,
        "quick": options.quick,
        "complete": complete,
        "environment": environment(options.device),
        "seconds": round(time.monotonic() - deadline.start_s, 1),
        "left_out": deadline.left_out,
        **body,
    }
    provenance.write_json(options.json, report)
