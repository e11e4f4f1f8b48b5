"""The commands of `flexinfer`. Each imports what it needs when it runs."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from typing import Annotated

import typer

from flexinfer.cli.bench.command import bench
from flexinfer.cli.chat.options import ChatSettings
from flexinfer.cli.demo.options import DemoSettings
from flexinfer.cli.doctor.command import doctor
from flexinfer.cli.errors import USAGE_ERROR, one_line
from flexinfer.cli.help import WholeNames
from flexinfer.cli.inspect.command import inspect
from flexinfer.cli.option_model import command_of
from flexinfer.cli.replay import replay
from flexinfer.cli.serve.command import serve
from flexinfer.cli.serve.options import ServeOptions
from flexinfer.cli.serve.vllm_line import ServeCommand
from flexinfer.cli.simulate.options import SimulateOptions
from flexinfer.cli.standard_output import is_of_standard_output, name_standard_output
from flexinfer.cli.top.command import top

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="LLM serving on a KV cache made of virtual memory.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"flexinfer {version('flexinfer')}")
        raise typer.Exit


@app.callback()
def _flexinfer(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass


def demo(settings: DemoSettings) -> None:
    """Several chats that share a long system prompt, run together, and what that saves."""
    from flexinfer.cli.demo.command import run_demo

    run_demo(settings)


def chat(settings: ChatSettings) -> None:
    """Chat with a model at the terminal; each turn reuses the KV cache of the turns before."""
    from flexinfer.cli.chat.command import run_chat

    run_chat(settings)


def simulate(options: SimulateOptions) -> None:
    """A trace on a fleet of replicas in virtual time: what each router makes of it."""
    from flexinfer.cli.simulate.command import run_simulate

    run_simulate(options)


app.command(cls=WholeNames)(command_of(DemoSettings, demo))
app.command(cls=WholeNames)(command_of(ChatSettings, chat))
app.command(cls=WholeNames)(replay)
app.command(cls=WholeNames)(command_of(SimulateOptions, simulate))
app.command(cls=WholeNames)(inspect)
app.command(cls=WholeNames)(top)
app.command(cls=WholeNames)(doctor)
app.command(cls=ServeCommand)(command_of(ServeOptions, serve))
app.add_typer(bench)


def main() -> None:
    """Entry point of the `flexinfer` command."""
    code: list[int] = []
    atexit.register(_leave, code)  # of what a command registers the last to be called
    name_standard_output()
    try:
        _run_app()
    except SystemExit as end:
        if isinstance(end.code, int):
            code.append(end.code)
        raise


def _run_app() -> None:
    """Raises SystemExit. A standard output that takes nothing is one line."""
    try:
        app()
    except OSError as error:
        if not is_of_standard_output(error):
            raise
        if not isinstance(error, BrokenPipeError):  # whoever has read enough is told nothing
            typer.secho(f"flexinfer: {one_line(error)}", fg="red", err=True)
        raise SystemExit(USAGE_ERROR) from None


def _leave(code: list[int]) -> None:
    """End the process without taking the interpreter apart: of what torch has loaded that takes a
    second, for which whoever stops a server waits."""
    if code:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # to nobody, or closed
                stream.flush()
        os._exit(code[0])
