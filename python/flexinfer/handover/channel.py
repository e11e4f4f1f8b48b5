"""Channel: messages with open files between two processes of one machine, over a Unix socket.

    8 bytes "FXHAND2\\n" | 4 bytes: length of the header | header, JSON   + files (SCM_RIGHTS)

Only processes of the same user are spoken to. One thread at a time at either end.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from flexinfer.errors import HandoverError

MAGIC = b"FXHAND2\n"
MAX_HEADER_BYTES = 64 << 20
FILES_AT_ONCE = 250
"""Linux takes 253."""
MAX_FILES = 4000
"""Of one message."""


class ChannelTimeoutError(HandoverError):
    """Nothing came, or could be sent, in time."""


class Channel:
    """One end of a connection. Its errors are HandoverError; the connection is of no more use."""

    def __init__(self, connection: socket.socket, timeout_s: float | None) -> None:
        """`timeout_s`: how long one message may take, and how long one is waited for."""
        connection.settimeout(timeout_s)
        self._socket = connection
        self._check_partner()

    @classmethod
    def connect(cls, path: str, timeout_s: float | None) -> Self:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout_s)
            connection.connect(path)
            return cls(connection, timeout_s)
        except OSError as error:
            connection.close()
            raise failure(f"nobody answers at {path}", error) from None
        except HandoverError:
            connection.close()
            raise

    def _check_partner(self) -> None:
        """Raises HandoverError for who is not to be spoken to."""
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        _, user, _ = struct.unpack("3i", credentials)
        if user != os.getuid():
            raise HandoverError(f"the other process is user {user}'s, not ours")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def fileno(self) -> int:
        """Readable once the other side has sent something, or has gone."""
        return self._socket.fileno()

    def set_timeout(self, timeout_s: float | None) -> None:
        """From now on."""
        self._socket.settimeout(timeout_s)

    def interrupt(self) -> None:
        """End what another thread waits for."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def send(self, header: dict[str, Any], files: Sequence[int] = ()) -> None:
        """The descriptors stay the caller's; the receiver has its own."""
        if len(files) > MAX_FILES:
            raise HandoverError(f"{len(files)} files are more than one message can take")
        body = json.dumps({**header, "num_files": len(files)}, separators=(",", ":")).encode()
        message = MAGIC + struct.pack(">I", len(body)) + body
        try:
            for first in range(0, len(files), FILES_AT_ONCE):
                some = list(files[first : first + FILES_AT_ONCE])
                message = message[socket.send_fds(self._socket, [message[:1]], some) :]
            self._socket.sendall(message)
        except OSError as error:
            raise failure("the other process is gone", error) from None

    def receive(self) -> tuple[dict[str, Any], list[int]]:
        """A header and the descriptors that came with it, which are the caller's to close."""
        files: list[int] = []
        try:
            start = self._receive(len(MAGIC) + 4, files)
            if not start.startswith(MAGIC):
                raise HandoverError("the other process does not speak this protocol")
            (length,) = struct.unpack(">I", start[len(MAGIC) :])
            if length > MAX_HEADER_BYTES:
                raise HandoverError(f"a header of {length} bytes is too long")
            header = json.loads(self._receive(length, files))
            if not isinstance(header, dict) or header.get("num_files") != len(files):
                raise HandoverError(
                    f"{len(files)} files came with a message, not as many as it says"
                )
            return header, files
        except HandoverError:
            close_files(files)
            raise
        except (OSError, ValueError, RecursionError) as error:
            close_files(files)
            raise failure("a message could not be received", error) from None

    def _receive(self, num_bytes: int, files: list[int]) -> bytes:
        room = socket.CMSG_SPACE((FILES_AT_ONCE + 3) * struct.calcsize("i"))
        received = bytearray()
        while len(received) < num_bytes:
            part, ancillary, flags, _ = self._socket.recvmsg(
                min(num_bytes - len(received), 1 << 20), room, socket.MSG_CMSG_CLOEXEC
            )
            for level, kind, data in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    count = len(data) // struct.calcsize("i")
                    files += struct.unpack(f"{count}i", data[: count * struct.calcsize("i")])
            if flags & socket.MSG_CTRUNC or len(files) > MAX_FILES:
                raise HandoverError(
                    "a message with too many open files, or none can be opened here"
                )
            if not part:
                raise HandoverError(
                    f"the other process ended within a message, after {len(received)} of "
                    f"{num_bytes} bytes"
                )
            received += part
        return bytes(received)


def failure(what: str, error: Exception) -> HandoverError:
    """Of a connection, told as one of a hand-over."""
    kind = ChannelTimeoutError if isinstance(error, TimeoutError) else HandoverError
    return kind(f"{what}: {error}")


def close_files(files: Sequence[int]) -> None:
    for file in files:
        with suppress(OSError):
            os.close(file)
