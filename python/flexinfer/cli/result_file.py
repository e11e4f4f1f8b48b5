"""ResultFile: what a command has found, written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import typer

from flexinfer.cli.errors import reason_of

FAILED = 1


@contextmanager
def result_file(file: Path) -> Iterator[Path]:
    """A file to write, with the ending of `file`, which takes its place once it is written.

    Where that fails (the disk is full) what `file` was stays, and the command ends with one line
    and exit code 1. What cannot be replaced (/dev/stdout, a folder that is not ours) is written.
    """
    is_plain = not file.is_symlink() and (file.is_file() or not file.exists())
    is_replaced = is_plain and os.access(file.absolute().parent, os.W_OK)
    part = file.with_name(f"{file.stem}.part{file.suffix}") if is_replaced else file
    try:
        yield part
        if is_replaced:
            part.replace(file)
    except OSError as error:
        if is_replaced:
            with suppress(OSError):
                part.unlink()
        typer.secho(f"flexinfer: {file} is not written: {reason_of(error)}", fg="red", err=True)
        raise typer.Exit(FAILED) from None
