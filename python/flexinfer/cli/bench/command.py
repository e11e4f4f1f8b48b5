"""`flexinfer bench ...`: the group of commands that measure; one file a command."""

from __future__ import annotations

import typer

from flexinfer.cli.bench.options import LoadOptions
from flexinfer.cli.bench.serve import serve
from flexinfer.cli.bench.step import step
from flexinfer.cli.help import WholeNames
from flexinfer.cli.option_model import command_of

bench = typer.Typer(name="bench", no_args_is_help=True, help="Measure a server or the engine.")
bench.command(cls=WholeNames)(command_of(LoadOptions, serve))
bench.command(cls=WholeNames)(step)
