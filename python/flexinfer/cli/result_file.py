"""ResultFile: what a command has found, written whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from flexinfer.runtime.reasons import reason_of
from flexinfer.runtime.whole_file import whole_file

FAILED = 1


@contextmanager
def result_file(file: Path) -> Iterator[Path]:
    """As `whole_file`; where it fails the command ends with one line and exit code 1."""
    try:
        with whole_file(file) as part:
            yield part
    except OSError as error:
        typer.secho(f"flexinfer: {file} is not written: {reason_of(error)}", fg="red", err=True)
        raise typer.Exit(FAILED) from None
