"""The demo's tables: each turn, the memory map, physical bytes, and the verdict."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from flexinfer.cli.demo.checks import Check
from flexinfer.cli.demo.records import Run, Turn
from flexinfer.cli.memory_map import render_map
from flexinfer.cli.terminal_text import ms_text, size_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MAX_FAILURES_SHOWN = 6


def print_report(console: Console, cached: Run, uncached: Run) -> None:
    """All tables of two runs."""
    console.print()
    console.print(turn_table(cached, uncached))
    console.print()
    _print_map(console, cached)
    console.print()
    console.print(memory_table(cached, uncached))


def turn_table(cached: Run, uncached: Run) -> Table:
    """A section for each turn, a row for each conversation."""
    from rich.table import Table

    table = Table(title="Each turn: what was reused, and what that saves", title_justify="left")
    heads = ("turn", "conv.", "prompt", "reused", "computed", "new", "chunks\naliased")
    more = ("chunks\ncopied", "first token, ms\ncache", "first token, ms\nno cache")
    for head in (*heads, *more):
        table.add_column(head, justify="right")
    slow = {(turn.conversation, turn.turn): turn for turn in uncached.turns}
    for number in range(1, cached.num_turns + 1):
        entries = cached.of_turn(number)
        for entry in entries:
            other = slow.get((entry.conversation, entry.turn))
            table.add_row(*_turn_cells(entry, other), end_section=entry is entries[-1])
    table.add_row(*_median_cells(cached, uncached), style="bold")
    return table


def _turn_cells(turn: Turn, uncached: Turn | None) -> tuple[str, ...]:
    return (
        str(turn.turn) if turn.conversation == 1 else "",
        str(turn.conversation),
        str(turn.num_prompt_tokens),
        str(turn.num_reused_tokens),
        str(turn.num_computed_tokens),
        str(turn.num_new_tokens),
        str(turn.chunks_aliased),
        str(turn.chunks_copied),
        ms_text(turn.time_to_first_token_s),
        ms_text(uncached.time_to_first_token_s if uncached else None),
    )


def _median_cells(cached: Run, uncached: Run) -> tuple[str, ...]:
    turns = cached.turns
    return (
        "all",
        "",
        str(sum(turn.num_prompt_tokens for turn in turns)),
        str(sum(turn.num_reused_tokens for turn in turns)),
        str(sum(turn.num_computed_tokens for turn in turns)),
        str(sum(turn.num_new_tokens for turn in turns)),
        str(sum(turn.chunks_aliased for turn in turns)),
        str(sum(turn.chunks_copied for turn in turns)),
        f"median {ms_text(median(turn.time_to_first_token_s for turn in turns))}",
        f"median {ms_text(median(turn.time_to_first_token_s for turn in uncached.turns))}",
    )


def _print_map(console: Console, cached: Run) -> None:
    from rich.text import Text

    tokens = cached.chunk_bytes * cached.num_planes / cached.bytes_per_token
    planes = f", first of {cached.num_planes} planes" if cached.num_planes > 1 else ""
    console.print(
        Text("Memory map in the last turn", "italic")
        + Text(
            f": each letter is a chunk of {size_text(cached.chunk_bytes)} "
            f"(about {tokens:.0f} tokens{planes})"
        )
    )
    console.print(render_map(cached.map_rows, console.width))


def memory_table(cached: Run, uncached: Run) -> Table:
    """Physical bytes with and without sharing."""
    from rich.table import Table

    table = Table(title="Physical memory of the KV cache", title_justify="left")
    for head in ("", "peak", "after the last turn"):
        table.add_column(head, justify="right" if head else "left")
    table.add_row("with sharing (measured)", *_peak_and_end(cached, "used_bytes"))
    table.add_row("the same, each with chunks of its own", *_peak_and_end(cached, "unshared_bytes"))
    table.add_row("prefix cache off: nothing kept", *_peak_and_end(uncached, "used_bytes"))
    table.add_row("saved by sharing", *_saved(cached), style="bold")
    return table


def _peak_and_end(run: Run, what: str) -> tuple[str, str]:
    return size_text(run.peak(what)), size_text(run.end(what))


def _saved(run: Run) -> tuple[str, str]:
    peak = run.peak("used_bytes"), run.peak("unshared_bytes")
    end = run.end("used_bytes"), run.end("unshared_bytes")
    return _percent(*peak), _percent(*end)


def _percent(used: int, unshared: int) -> str:
    return f"{100 * (1 - used / unshared):.0f} %" if unshared else "-"


def print_checks(console: Console, cached: Run, checks: list[Check]) -> bool:
    """One line for each check and one for all; returns whether all passed."""
    console.print()
    for check in checks:
        mark = "[green]ok  [/green]" if check.passed else "[bold red]FAIL[/bold red]"
        console.print(f"{mark}  {check.claim}")
        for failure in check.failures[:MAX_FAILURES_SHOWN]:
            console.print(f"      {failure}", markup=False, highlight=False, soft_wrap=True)
        if len(check.failures) > MAX_FAILURES_SHOWN:
            console.print(f"      and {len(check.failures) - MAX_FAILURES_SHOWN} more")
    passed = all(check.passed for check in checks)
    line = _verdict_line(cached, checks, passed)
    console.print(line, markup=False, highlight=False, soft_wrap=True)
    return passed


def _verdict_line(cached: Run, checks: list[Check], passed: bool) -> str:
    if not passed:
        broken = "; ".join(check.claim for check in checks if not check.passed)
        return f"flexinfer demo: FAILED - not true: {broken}"
    reused = sum(turn.num_reused_tokens for turn in cached.turns)
    prompt = sum(turn.num_prompt_tokens for turn in cached.turns)
    saved = _percent(cached.peak("used_bytes"), cached.peak("unshared_bytes"))
    return (
        f"flexinfer demo: PASSED - {cached.num_conversations} conversations, {cached.num_turns} "
        f"turns, {100 * reused / prompt:.0f} % of the prompt tokens reused, {saved} less KV memory"
    )
