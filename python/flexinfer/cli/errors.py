"""Bad input ends a command with one line and exit code 2, not with a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from flexinfer.cli.standard_output import is_of_standard_output
from flexinfer.runtime.reasons import reason_of

USAGE_ERROR = 2


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn errors that say what the user asked wrongly into one line on stderr.

    FLEXINFER_TRACEBACK=1 lets them through, for those who look for the place.
    """
    try:
        yield
    except Exception as error:
        is_told = isinstance(error, _usage_kinds()) and not is_of_standard_output(error)
        if os.environ.get("FLEXINFER_TRACEBACK") or not is_told:
            raise
        typer.secho(f"flexinfer: {one_line(error)}", fg="red", err=True)
        raise typer.Exit(USAGE_ERROR) from None


def _usage_kinds() -> tuple[type[BaseException], ...]:
    """DriverError among them where the extension is loaded: a mapping that the system refuses, or
    a --swap-directory that is not there; and RankError: what ended a process that was to take part.
    Neither is loaded for this."""
    kinds = (ValueError, LookupError, MemoryError, ImportError, OSError)
    errors = sys.modules.get("flexinfer.errors")
    return kinds if errors is None else (*kinds, errors.DriverError, errors.RankError)


def one_line(error: BaseException) -> str:
    """What an exception says, on one line; of a file, why it cannot be used and what to do."""
    text = reason_of(error)
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        text = f"cannot use {error.filename}: {text}"
    return " ".join(text.split()) or type(error).__name__


def check_folder(file: Path, option: str) -> None:
    """Raises ValueError, before any work, if `file` could not be written."""
    folder = file.resolve().parent
    if not folder.is_dir():
        raise ValueError(f"{option}: the folder of {str(file)!r} does not exist; make it first")
    if file.is_dir():
        raise ValueError(f"{option}: {str(file)!r} is a folder; name a file")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise ValueError(f"{option}: this user may not write {str(file)!r}; check its permissions")
