"""`flexinfer bench ...`: the group of commands that measure; one file a command."""

from __future__ import annotations

import typer

from flexinfer.cli.bench.serve import serve
from flexinfer.cli.bench.step import step
from flexinfer.cli.help import WholeNames

bench = typer.Typer(name="bench", no_args_is_help=True, help="Measure a server or the engine.")
bench.command(cls=WholeNames)(serve)
bench.command(cls=WholeNames)(step)
