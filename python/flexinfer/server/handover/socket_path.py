"""Where a server listens on its own machine: a Unix socket that only its user can connect to.

`option`: what errors call the path.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

MAX_PATH_BYTES = 107
"""Of a Unix socket's path, in Linux."""
HANDOVER = "handover_socket"


def check_path(path: Path, option: str = HANDOVER) -> None:
    """Raises ValueError for what no socket can be at, OSError where another server listens."""
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ValueError(
            f"{option} {str(path)!r} is longer than the {MAX_PATH_BYTES} bytes that a "
            "Unix socket's path may have"
        )
    if not path.parent.is_dir():
        raise ValueError(f"{option} {str(path)!r}: there is no folder {str(path.parent)!r}")
    if path.exists() and not path.is_socket():
        raise ValueError(f"{option} {str(path)!r} is there, and is no socket")


def check_free(path: Path, option: str = HANDOVER) -> None:
    """As `check_path`, for who is to listen. What a killed server has left does no harm. Raises
    PermissionError for a folder in which this user cannot make files."""
    check_path(path, option)
    if not os.access(path.parent, os.W_OK | os.X_OK, effective_ids=True):
        raise PermissionError(
            f"{option} {str(path)!r}: this user cannot make files in {str(path.parent)!r}"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked:
        asked.settimeout(1.0)
        try:
            asked.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except OSError as error:  # its queue is full, or it is another user's
            raise OSError(f"{option} {str(path)!r} is in use: {error}") from None
    raise OSError(f"{option} {str(path)!r} is in use: a server listens there")


def bind(path: Path, option: str = HANDOVER) -> socket.socket:
    """A socket there, to which nobody can connect yet. Raises as `check_free`."""
    check_free(path, option)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
    except BaseException:
        listener.close()
        raise
    return listener


def listen(path: Path) -> socket.socket:
    """A socket that listens there. Raises as `check_free`."""
    listener = bind(path)
    try:
        listener.listen(socket.SOMAXCONN)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener
