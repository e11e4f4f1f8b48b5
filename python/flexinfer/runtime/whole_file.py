"""WholeFile: a file that is written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """A file to write, with the ending of `file`, which takes its place once it is written. Where
    that fails (the disk is full), what `file` was stays, and the error goes on.

    What cannot be replaced (/dev/stdout, a file in a folder that is not ours) is written itself.
    """
    is_plain = not file.is_symlink() and (file.is_file() or not file.exists())
    if not is_plain or not os.access(file.absolute().parent, os.W_OK):
        yield file
        return
    part = file.with_name(f"{file.stem}.part{file.suffix}")
    try:
        yield part
        part.replace(file)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
