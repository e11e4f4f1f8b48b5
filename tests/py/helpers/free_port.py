"""free_port(): a port for a server that a test starts a moment later."""

from __future__ import annotations

import secrets
import socket

FIRST, COUNT = 20_000, 10_000
"""Below those that the system gives to whoever asks for any."""


def free_port() -> int:
    """Of this machine's loopback. Another test's connection is not given it meanwhile."""
    while True:
        port = FIRST + secrets.randbelow(COUNT)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
