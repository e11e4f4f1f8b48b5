"""Idle connections: kept longer than clients keep theirs."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from flexinfer.server.settings import ServerSettings
from helpers.serving import MODEL, ServerProcess

ASK = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
POOLS_S = {"httpx, openai, anthropic": 5, "aiohttp": 15, "AWS load balancers": 60}
"""After so many seconds they give up an idle connection themselves."""


def seconds_kept(url: str, most: float) -> float:
    """How long a connection stays open after an answer; `most` where it outlives that."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), 60) as sock:
        sock.sendall(ASK)
        assert sock.recv(65536).startswith(b"HTTP/1.1 200")
        start_s = time.monotonic()
        sock.settimeout(most)
        try:
            while sock.recv(65536):
                pass
        except TimeoutError:
            return most
        return time.monotonic() - start_s


def test_a_connection_outlives_the_five_seconds_of_clients_pools(server: ServerProcess) -> None:
    """uvicorn's own five seconds were httpx' too: requests met a connection just closed."""
    assert seconds_kept(server.url, 6.5) == 6.5


def test_it_is_kept_for_as_long_as_is_asked_for(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "log", "--timeout-keep-alive", "1") as process:
        kept_s = seconds_kept(process.wait_until_ready().url, 30)
    assert 0.9 < kept_s < 5


def test_by_default_it_is_kept_longer_than_clients_keep_theirs() -> None:
    settings = ServerSettings(served_model_names=(MODEL,))
    assert settings.timeout_keep_alive > max(POOLS_S.values())
    with pytest.raises(ValueError, match="timeout_keep_alive must be more than 0 seconds, got 0"):
        ServerSettings(served_model_names=(MODEL,), timeout_keep_alive=0)
