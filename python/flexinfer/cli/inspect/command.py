"""`flexinfer inspect`: the memory map of a server as tables, as JSON or as a picture."""

from __future__ import annotations

import json as json_module
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexinfer.cli.errors import usage_errors
from flexinfer.cli.inspect.report import MemoryReport
from flexinfer.cli.options import AdminKey, Url

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

SIZES = ("reserved", "mapped", "resident", "shared", "saved", "recorded", "free", "parked")


def inspect(
    url: Url = None,
    admin_api_key: AdminKey = None,
    file: Annotated[
        Path | None, typer.Option(help="A map that was saved before, instead of a server's.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Every number, as JSON.")] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the map into this file (.png, .svg, .pdf).")
    ] = None,
) -> None:
    """Show which chunks are where, what shares them, and why a prefix cannot be freed."""
    with usage_errors():
        if picture is not None:
            from flexinfer.cli.plot import check_can_plot

            check_can_plot(picture, "--picture")
        report = MemoryReport.from_json(read_map(url, admin_api_key, file))
        if picture is not None:
            from flexinfer.cli.inspect.picture import draw_map

            draw_map(picture, report)
    if json:
        typer.echo(json_module.dumps(report.as_dict(), indent=2))
        return
    from rich.console import Console

    console = Console(highlight=False)
    for part in map_tables(report, console.width):
        console.print(part)
    if picture is not None:
        console.print(f"picture: {picture}", soft_wrap=True)


def read_map(url: str | None, admin_key: str | None, file: Path | None) -> Any:
    """What /admin/memory answered, now or when it was saved. Raises ValueError or OSError."""
    if file is None:
        from flexinfer.cli.endpoint import DEFAULT_URL, Endpoint

        with Endpoint(url or DEFAULT_URL, admin_key) as endpoint:
            return endpoint.get_json("/admin/memory")
    if url is not None:
        raise ValueError("--url and --file exclude each other")
    try:
        return json_module.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error


def map_tables(report: MemoryReport, width: int) -> Iterator[RenderableType]:
    """The numbers, the map in letters, and the tables."""
    from flexinfer.cli.memory_map import render_map

    yield _numbers(report)
    rows = report.rows()
    if rows:
        yield ""
        yield render_map(rows, width)
    if report.vtensors:
        yield ""
        yield _vtensor_table(report)
    if report.prefixes:
        yield ""
        yield _prefix_table(report)
    if report.truncated:
        yield "the server left rows out: the map is too large to show in full"


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
    table = _table("vTensors", ("", "state", "tokens", "cached", "chunks", "shared"))
    for use in report.vtensors:
        numbers = (use.num_tokens, use.num_cached_tokens, len(use.chunks), use.num_shared_chunks)
        _add(table, use.label, use.state, *numbers)
    return table


def _prefix_table(report: MemoryReport) -> Table:
    heads = ("", "tokens", "tenant", "chunks", "only here", "shared by", "cannot be freed because")
    table = _table("Recorded prefixes", heads)
    for use in report.prefixes:
        tokens = f"{use.start_tokens}-{use.start_tokens + use.num_tokens - 1}"
        numbers = (len(use.chunks), use.num_freed_chunks)
        shared = ", ".join(use.shared_by) or "-"
        why = "; ".join(use.kept_because) or "it can"
        _add(table, use.label, tokens, use.tenant or "-", *numbers, shared, why)
    return table


def _table(title: str, heads: tuple[str, ...]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for head in heads:
        table.add_column(head, overflow="fold")
    return table


def _add(table: Table, *cells: object) -> None:
    from rich.text import Text

    from flexinfer.cli.terminal_text import one_row

    table.add_row(*(Text(one_row(str(cell))) for cell in cells))
