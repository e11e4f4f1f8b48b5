"""WholeNames: help in which every option's name stands whole on a terminal of 80 columns, and what
to do without options that vLLM's users know.

Typer gives `--no-...` a column of its own, and cuts names off where the columns do not fit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from typer.core import TyperCommand

from flexinfer.runtime.vllm_arguments import advice


class WholeNames(TyperCommand):
    """A command whose help names the `--no-...` form of an option in its text."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # typer brings click's along, not always under one name
            name = str(getattr(error, "option_name", "")).lstrip("-").replace("-", "_")
            is_unknown = type(error).__name__ == "NoSuchOption"
            if is_unknown and (what := advice(name)) is not None:
                error.message = f"There is no option --{name.replace('_', '-')}: {what}."  # type: ignore[attr-defined]
                error.possibilities = None  # type: ignore[attr-defined]
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        shown = copy.copy(self)
        shown.params = [_with_one_name(p) for p in self.params if not getattr(p, "hidden", False)]
        with _names_uncut():
            super(WholeNames, shown).format_help(ctx, formatter)


@contextmanager
def _names_uncut() -> Iterator[None]:
    """Typer makes its tables itself, and rich cuts the longest words of all columns alike; until
    typer keeps names from that."""
    from rich.table import Table
    from typer import rich_utils

    module: Any = rich_utils

    class WholeFirstColumn(Table):
        def add_row(self, *cells: Any, **settings: Any) -> None:
            super().add_row(*cells, **settings)
            self.columns[0].no_wrap = True

    module.Table = WholeFirstColumn
    try:
        yield
    finally:
        module.Table = Table


def _with_one_name(param: Any) -> Any:
    """A copy for the help alone: what was given at the command line is read by the original."""
    if not getattr(param, "secondary_opts", ()):
        return param
    shown = copy.copy(param)
    turns_off = f"{param.secondary_opts[0]} turns it off."
    states = {True: f"On by default; {turns_off}", False: "Off by default.", None: turns_off}
    shown.help = f"{param.help} {states[param.default]}"
    shown.secondary_opts = []
    shown.show_default = False
    return shown
