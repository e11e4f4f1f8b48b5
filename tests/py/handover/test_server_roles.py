"""What `flexinfer serve` is told of its role: refused by name where it does not go together."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")

from flexinfer.server.handover.endpoints import NetworkEndpoint
from flexinfer.server.handover.socket_path import check_free, listen
from helpers.serving import settings

NOBODY = 65534
SOCKET: dict[str, Any] = {"handover_socket": Path("/tmp/x")}
ADDRESS: dict[str, Any] = {"handover_address": "10.0.0.1:7000", "handover_key": "k" * 16}


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"role": "prefill"}, "role 'prefill' needs handover_socket"),
        ({"role": "decode"}, "role 'decode' needs handover_socket"),
        ({"handover_socket": Path("/tmp/x")}, "handover_socket needs role"),
        ({"role": "decode", "handover_socket": Path("/tmp/" + "x" * 110)}, "longer than the 107"),
        ({"role": "decode", "handover_socket": Path("/nowhere/x")}, "there is no folder"),
        ({"role": "decode", "handover_socket": Path(__file__)}, "is there, and is no socket"),
        ({"handover_address": "a:1"}, "handover_address needs role"),
        ({"role": "decode", **SOCKET, **ADDRESS}, "does not go with handover_address"),
        ({"role": "decode", **SOCKET, "handover_key": "k"}, "handover_key needs handover_address"),
        ({"role": "decode", **ADDRESS, "handover_key": None}, "needs handover_key"),
        ({"role": "decode", **ADDRESS, "handover_key": "short"}, "at least 16 characters"),
        ({"role": "decode", **ADDRESS, "handover_address": "7000"}, "HOST:PORT, got '7000'"),
        ({"role": "decode", **ADDRESS, "handover_address": "host:99999"}, "HOST:PORT"),
        ({"handover_timeout_s": 0}, "handover_timeout_s must be more than 0"),
        ({"handover_min_tokens": 0}, "handover_min_tokens must be at least 1"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        settings(**changed)


def test_two_servers_do_not_listen_at_one_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OSError, match=f"handover_address {address} cannot be listened at"):
            NetworkEndpoint.of(address, "k" * 16).check_free()


def test_two_servers_do_not_listen_at_one_socket(tmp_path: Path) -> None:
    path = tmp_path / "kv.sock"
    with listen(path) as listener:
        with pytest.raises(OSError, match="in use: a server listens there"):
            check_free(path)
        assert path.stat().st_mode & 0o777 == 0o600
        listener.close()
    listen(path).close()  # what a killed server has left


def test_a_folder_in_which_no_socket_can_be_made_is_said_before_the_model_loads() -> None:
    with TemporaryDirectory() as name:  # not below tmp_path, which only its user may enter
        folder = Path(name)
        folder.chmod(0o555)
        with _not_as_root(), pytest.raises(OSError, match="this user cannot make files in"):
            check_free(folder / "kv.sock")
        folder.chmod(0o755)


@contextmanager
def _not_as_root() -> Iterator[None]:
    """Root may write anywhere."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)
