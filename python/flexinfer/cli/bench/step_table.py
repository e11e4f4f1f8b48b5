"""The table of a step's parts, as `flexinfer bench step --profile` prints it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


def profile_table(prefill: dict[str, Any], decode: dict[str, Any]) -> Table:
    """Parts as rows, the two kinds of steps as columns; narrow enough for 80 columns."""
    from rich import box
    from rich.table import Table

    has_limits = "of_limit" in decode
    last = "of\nlimit" if has_limits else "calls"
    table = Table(
        title="milliseconds per step",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    table.add_column("part", no_wrap=True)
    for name, kind in (("prefill", prefill), ("decode", decode)):
        table.add_column(f"{name},\n{kind['tokens_per_step']:.0f} tokens", justify="right")
        table.add_column("share", justify="right")
        table.add_column(last, justify="right")
    for part in decode["parts"]:
        row = [part]
        for kind in (prefill, decode):
            numbers = kind["parts"][part]
            row += [f"{numbers['ms']:.3f}", f"{numbers['share']:.1%}"]
            row.append(_percent(numbers) if has_limits else f"{numbers['calls']:.0f}")
        table.add_row(*row)
    table.add_section()
    total: list[str] = []
    for kind in (prefill, decode):
        total += [f"{kind['step_ms']:.3f}", "", _percent(kind) if has_limits else ""]
    table.add_row("step", *total)
    return table


def _percent(numbers: dict[str, Any]) -> str:
    return f"{numbers['of_limit']:.0%}" if numbers["of_limit"] else ""
