"""WholeNames: help in which every option's name stands whole on a terminal of 80 columns.

Typer gives `--no-...` a column of its own, and cuts names off where the columns do not fit.
"""

from __future__ import annotations

import copy
from typing import Any

from typer.core import TyperCommand


class WholeNames(TyperCommand):
    """A command whose help names the `--no-...` form of an option in its text."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        shown = copy.copy(self)
        shown.params = [_with_one_name(p) for p in self.params if not getattr(p, "hidden", False)]
        super(WholeNames, shown).format_help(ctx, formatter)


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
