"""`flexinfer replay`: a trace run again on any driver, as a table or as JSON."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexinfer.cli.errors import usage_errors
from flexinfer.cli.fitting_table import FittingTable
from flexinfer.cli.terminal_text import size_text

if TYPE_CHECKING:
    from rich.table import Table

    from flexinfer.replay.report import ReplayReport

MAX_SHORTAGES_SHOWN = 8
Switch = Annotated[bool | None, typer.Option(help="Without it: as it was recorded.")]


def replay(
    file: Annotated[Path, typer.Argument(help="A trace, written with --trace FILE.")],
    device: Annotated[str, typer.Option(help="sim (no memory), cpu or cuda.")] = "sim",
    chunk_bytes: Annotated[
        str | None, typer.Option(help="Another chunk size, such as 64KiB or 2MiB.")
    ] = None,
    layers_per_plane: Annotated[
        int | None, typer.Option(min=1, help="Another layout; 1: each layer in ranges of its own.")
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Another budget, such as 256MiB.")] = None,
    park: Switch = None,
    dedup: Switch = None,
    alias: Switch = None,
    pre_extend: Switch = None,
    latency: Annotated[str, typer.Option(help="Of driver calls on sim: a100 or none.")] = "a100",
    allow_truncated: Annotated[
        bool, typer.Option("--allow-truncated", help="Replay a cut-off file as far as it goes.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Every number, as JSON.")] = False,
) -> None:
    """Run a recorded trace again, without a model: time, waste and peak of memory."""
    with usage_errors():
        from flexinfer.replay.replay import replay as run

        report = run(
            file,
            device,
            chunk_bytes=chunk_bytes,
            layers_per_plane=layers_per_plane,
            memory_budget=memory,
            park=park,
            dedup=dedup,
            alias=alias,
            pre_extend=pre_extend,
            latency=latency,  # type: ignore[arg-type]
            allow_truncated=allow_truncated,
        )
    if json:
        typer.echo(json_module.dumps(report.as_dict(), indent=2))
        return
    _print(report)


def _print(report: ReplayReport) -> None:
    from rich.console import Console

    console = Console()
    layout = f"{report.layers_per_plane} layers per plane"
    console.print(
        f"{report.num_operations} operations on {report.device}, chunks of "
        f"{size_text(report.chunk_bytes)}, {layout}, budget "
        f"{size_text(report.memory_budget_bytes)}, in {report.wall_s:.2f} s"
        + ("; the file is cut off" if report.truncated else "")
    )
    console.print(FittingTable(_totals(report)))
    console.print(FittingTable(_calls(report)))
    for shortage in report.shortages[:MAX_SHORTAGES_SHOWN]:
        name = shortage.label or f"vTensor {shortage.vtensor}"
        console.print(f"short of memory, line {shortage.line}: {shortage.op} of {name}")
    more = len(report.shortages) - MAX_SHORTAGES_SHOWN
    if more > 0:
        console.print(f"... and {more} more")


def _totals(report: ReplayReport) -> Table:
    from rich.table import Table

    table = Table(title="Memory", title_justify="left")
    for head in ("", "recorded", "replayed"):
        table.add_column(head, justify="right" if head else "left")
    old, new = report.recorded, report.replayed

    def row(name: str, before: Any, after: Any) -> None:
        table.add_row(name, str(before), str(after))

    row("peak resident", size_text(old.peak_resident_bytes), size_text(new.peak_resident_bytes))
    row("peak mapped", "", size_text(report.peak_mapped_bytes))
    row("waste at the peak", "", size_text(report.waste_at_peak_bytes))
    row("waste, mean", "", size_text(int(report.mean_waste_bytes)))
    row("prefix hit tokens", old.prefix_hit_tokens, new.prefix_hit_tokens)
    row("chunks aliased", old.chunks_aliased, new.chunks_aliased)
    row("chunks copied", old.chunks_copied, new.chunks_copied)
    row("chunks evicted", old.chunks_evicted, new.chunks_evicted)
    row("chunks adopted", old.chunks_adopted, new.chunks_adopted)
    row("chunks deduplicated", old.chunks_deduplicated, new.chunks_deduplicated)
    row("chunks swapped out", old.chunks_swapped_out, new.chunks_swapped_out)
    row("shortages", old.num_shortages, new.num_shortages)
    row("  of these new", "", len(report.shortages))
    row("operations skipped", "", report.num_skipped)
    return table


def _calls(report: ReplayReport) -> Table:
    from rich.table import Table

    table = Table(title="Driver time, ms", title_justify="left")
    heads = ("", "calls\nrecorded", "exposed", "hidden", "calls\nreplayed", "exposed", "hidden")
    for head in heads:
        table.add_column(head, justify="right" if head else "left")
    runs = (report.recorded, report.replayed)
    for kind in sorted({kind for run in runs for kind in run.driver_calls}):
        cells = []
        for run in runs:
            call = run.driver_calls.get(kind)
            cells += ["", "", ""] if call is None else [str(call.calls), *_ms(call)]
        table.add_row(kind, *cells)
    table.add_section()
    totals = [
        text
        for run in runs
        for text in ("", f"{run.driver_us_exposed / 1e3:.2f}", f"{run.driver_us_hidden / 1e3:.2f}")
    ]
    table.add_row("all", *totals)
    return table


def _ms(call: Any) -> list[str]:
    return [f"{(call.us - call.hidden_us) / 1e3:.2f}", f"{call.hidden_us / 1e3:.2f}"]
