"""Standard output whose errors say that it is what cannot be written, as those of files do."""

from __future__ import annotations

import io
import sys

STANDARD_OUTPUT = "standard output"


class _Named(io.FileIO):
    def write(self, data: bytes) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, STANDARD_OUTPUT) from None


def name_standard_output() -> None:
    """In a process of our own; where it is closed (`>&-`) it stays so."""
    stdout = sys.stdout
    if isinstance(stdout, io.TextIOWrapper):
        stdout.flush()
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_Named(stdout.fileno(), "w", closefd=False)),
            stdout.encoding,
            stdout.errors,
            line_buffering=stdout.line_buffering,
            write_through=stdout.write_through,
        )


def is_of_standard_output(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.filename == STANDARD_OUTPUT
