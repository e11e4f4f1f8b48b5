"""`flexinfer inspect`: the memory of a server in short, as a map, as tables, JSON or a picture."""

from __future__ import annotations

import json as json_module
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexinfer.cli.errors import usage_errors
from flexinfer.cli.inspect.report import MemoryReport
from flexinfer.cli.options import AdminKey, Url
from flexinfer.cli.result_file import result_file
from flexinfer.runtime.reasons import reason_of

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

SIZES = ("reserved", "mapped", "resident", "shared", "saved", "recorded", "free", "parked")
MAX_CELL_CHARS = 40


def inspect(
    url: Url = None,
    admin_api_key: AdminKey = None,
    file: Annotated[
        Path | None, typer.Option(help="A map that was saved before, instead of a server's.")
    ] = None,
    replica: Annotated[
        str | None, typer.Option(help="Whose memory, where several serve; else of one of them.")
    ] = None,
    map_: Annotated[
        bool, typer.Option("--map", help="Every row, a letter a chunk; a capital is shared.")
    ] = False,
    tables: Annotated[
        bool, typer.Option("--tables", help="What each row shares, and why a prefix stays.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Every number, as JSON.")] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the map into this file (.png, .svg, .pdf).")
    ] = None,
) -> None:
    """Show what memory is used, shared and free; with options: which chunks, and why they stay."""
    with usage_errors():
        if picture is not None:
            from flexinfer.cli.plot import check_can_plot

            check_can_plot(picture, "--picture")
        report = read_report(url, admin_api_key, file, replica)
        if picture is not None:
            from flexinfer.cli.inspect.picture import draw_map

            with result_file(picture) as drawn:
                draw_map(drawn, report)
    if json:
        typer.echo(json_module.dumps(report.as_dict(), indent=2))
        return
    from rich.console import Console

    console = Console(highlight=False)
    for part in report_parts(report, console.width, with_map=map_, with_tables=tables):
        console.print(part)
    if picture is not None:
        console.print(f"picture: {picture}", soft_wrap=True)


def read_report(
    url: str | None, admin_key: str | None, file: Path | None, replica: str | None = None
) -> MemoryReport:
    """What /admin/memory answered, now or when it was saved. Raises ValueError or OSError."""
    if file is None:
        from flexinfer.cli.endpoint import ADMIN_KEY, DEFAULT_URL, Endpoint, memory_path

        with Endpoint(url or DEFAULT_URL, admin_key, source=ADMIN_KEY) as endpoint:
            return MemoryReport.from_json(endpoint.get_json(memory_path(replica)))
    if replica is not None:
        raise ValueError("--replica and --file exclude each other")
    if url is not None:
        raise ValueError("--url and --file exclude each other")
    try:
        saved = json_module.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {reason_of(error)}") from error
    try:
        return MemoryReport.from_json(saved)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def report_parts(
    report: MemoryReport, width: int, *, with_map: bool = False, with_tables: bool = False
) -> Iterator[RenderableType]:
    """What was asked for; in short, if nothing was."""
    from rich.text import Text

    from flexinfer.cli.fitting_table import FittingTable
    from flexinfer.cli.inspect.summary import summary_lines

    if not with_map and not with_tables:
        yield from (Text(line) for line in summary_lines(report, width))
    if with_map:
        yield _numbers(report)
        yield from _map(report, width)
    if with_tables and report.vtensors:
        yield FittingTable(_vtensor_table(report))
    if with_tables and report.prefixes:
        yield FittingTable(_prefix_table(report))
    if report.truncated:
        yield "the server left rows out: the map is too large to show in full"


def _map(report: MemoryReport, width: int) -> Iterator[RenderableType]:
    from flexinfer.cli.memory_map import render_map

    rows = report.rows()
    if rows:
        yield ""
        yield render_map(rows, width)
        yield ""


def _numbers(report: MemoryReport) -> str:
    from flexinfer.cli.terminal_text import printable, size_text

    stats = report.stats
    sizes = ", ".join(f"{size_text(stats[f'{name}_bytes'])} {name}" for name in SIZES)
    planes = f", first of {report.num_planes} planes" if report.num_planes > 1 else ""
    return (
        f"{printable(report.model)}: {sizes}; budget {size_text(stats['budget_bytes'])}; "
        f"each letter is a chunk of {size_text(report.chunk_bytes)}{planes}"
    )


def _vtensor_table(report: MemoryReport) -> Table:
    table = _table("vTensors", "", "state", "tokens", "cached", "chunks", "shared")
    for use in report.vtensors:
        cached = str(use.num_cached_tokens)
        if use.cut_by_window:
            recorded = use.num_cached_tokens + use.num_cut_tokens
            cached = f"{cached} of {recorded} (window {use.cut_by_window:,})"
        numbers = (use.num_tokens, cached, len(use.chunks), use.num_shared_chunks)
        _add(table, use.label, use.state, *numbers)
    return table


def _prefix_table(report: MemoryReport) -> Table:
    table = _table("Recorded prefixes", "", "first words", "tokens", "chunks", "only here")
    for head in ("shared by", "cannot be freed because"):
        table.add_column(head, overflow="fold", max_width=MAX_CELL_CHARS)
    for use in report.prefixes:
        name = f"{use.text.strip()} (tenant {use.tenant})" if use.tenant else use.text.strip()
        tokens = f"{use.start_tokens}-{use.end_tokens - 1}"
        numbers = (len(use.chunks), use.num_freed_chunks)
        shared = ", ".join(use.shared_by) or "-"
        why = "; ".join(use.kept_because) or "-"
        _add(table, use.label.removeprefix("prefix "), name, tokens, *numbers, shared, why)
    return table


def _table(title: str, *heads: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for head in heads:
        table.add_column(head, overflow="ellipsis", no_wrap=True, max_width=MAX_CELL_CHARS)
    return table


def _add(table: Table, *cells: object) -> None:
    from rich.text import Text

    from flexinfer.cli.terminal_text import one_row

    table.add_row(*(Text(one_row(str(cell))) for cell in cells))
