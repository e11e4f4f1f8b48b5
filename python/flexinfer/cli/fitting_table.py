"""FittingTable: a table where the terminal is wide enough for it, else a paragraph for each row.

rich would leave out what does not fit, and half of a number is another number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table

UNBOUNDED = 10_000
"""Columns: what a table would take if it could."""


class FittingTable:
    """Cells are strings or rich's Text; others (bars) are left out of paragraphs."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        natural = console.measure(self._table, options=options.update(max_width=UNBOUNDED))
        if natural.maximum <= options.max_width:
            yield self._table
        else:
            yield from self._paragraphs()

    def _paragraphs(self) -> Iterator[RenderableType]:
        from rich.text import Text

        if self._table.title:
            yield Text(str(self._table.title), "italic")
        heads = [" ".join(str(column.header).split()) for column in self._table.columns]
        for name, *cells in zip(*(column.cells for column in self._table.columns), strict=True):
            told = [
                f"{head} {cell}".strip()
                for head, cell in zip(heads[1:], cells, strict=True)
                if isinstance(cell, (str, Text)) and cell
            ]
            yield Text(f"{name}: {'; '.join(told)}", overflow="fold")
