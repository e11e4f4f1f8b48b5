"""`flexinfer doctor`: what this machine offers, what is wrong with it, and what to do."""

from __future__ import annotations

import json as json_module
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from flexinfer.cli.doctor.checks import Check

FAILED = 1
STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "bold red"}


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Every check, as JSON.")] = False,
) -> None:
    """Check the device, the kernel's limits and the packages; exit code 1 if there is a problem."""
    from flexinfer.cli.doctor.checks import all_checks

    checks = all_checks()
    if json:
        typer.echo(json_module.dumps({"checks": [asdict(check) for check in checks]}, indent=2))
    else:
        _print(checks)
    if any(check.status == "problem" for check in checks):
        raise typer.Exit(FAILED)


def _print(checks: list[Check]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table.grid(padding=(0, 2))
    for check in checks:
        found = Text(check.found)
        if check.advice:
            found.append(f"\n{check.advice}", "dim")
        table.add_row(check.group, check.name, Text(check.status, STYLES[check.status]), found)
    console.print(table)
    counts = Counter[str](check.status for check in checks)
    console.print(", ".join(f"{counts[status]} {status}" for status in STYLES if counts[status]))
