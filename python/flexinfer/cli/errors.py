"""Bad input ends a command with one line and exit code 2, not with a traceback."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import typer

USAGE_ERROR = 2


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn errors that say what the user asked wrongly into one line on stderr.

    FLEXINFER_TRACEBACK=1 lets them through, for those who look for the place.
    """
    try:
        yield
    except (ValueError, LookupError, MemoryError, ImportError, OSError) as error:
        if os.environ.get("FLEXINFER_TRACEBACK"):
            raise
        typer.secho(f"flexinfer: {one_line(error)}", fg="red", err=True)
        raise typer.Exit(USAGE_ERROR) from None


def one_line(error: BaseException) -> str:
    """What an exception says, on one line."""
    return " ".join(str(error).split()) or type(error).__name__
