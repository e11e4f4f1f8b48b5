"""Hand-over to another machine: a channel over TCP for what is said, and a group of two of
torch.distributed for the planes (planes.py).

    decoding server                                  prefilling server
    nonce, proof that it knows the key       <-->    nonce, proof
    question, as on one machine              -->
                                             <--     where the group meets
    that it is there                         -->
    planes, into memory where they stay      <--     planes, from where they lie

What is said and sent is not encrypted: the key keeps strangers out, and who can listen must be
trusted.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from flexinfer.errors import HandoverError
from flexinfer.handover.channel import MAGIC, Channel, failure
from flexinfer.handover.planes import Peer

NONCE_BYTES = 32
GROUP_TIMEOUT_S = 30.0
"""For the group to form, and for the planes of one prompt."""


class NetworkChannel(Channel):
    """A channel over TCP between two processes that know the same key."""

    def __init__(
        self, connection: socket.socket, timeout_s: float | None, key: str, *, listens: bool
    ) -> None:
        """Raises HandoverError for a stranger."""
        self._key = hashlib.sha256(key.encode()).digest()
        self._names = (b"listens", b"asks") if listens else (b"asks", b"listens")
        super().__init__(connection, timeout_s)

    @classmethod
    def dial(cls, host: str, port: int, key: str, timeout_s: float | None) -> NetworkChannel:
        try:
            connection = socket.create_connection((host, port), timeout_s)
        except OSError as error:
            raise failure(f"nobody answers at {host}:{port}", error) from None
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            return cls(connection, timeout_s, key, listens=False)
        except HandoverError:
            connection.close()
            raise

    def _check_partner(self) -> None:
        own = secrets.token_bytes(NONCE_BYTES)
        try:
            self._socket.sendall(MAGIC + own)
            start = self._receive(len(MAGIC) + NONCE_BYTES, [])
            if not start.startswith(MAGIC):
                raise HandoverError("a stranger: it does not speak this protocol")
            theirs = start[len(MAGIC) :]
            self._socket.sendall(self._proof(self._names[0], own, theirs))
            proof = self._receive(NONCE_BYTES, [])
        except OSError as error:
            raise failure("the other process could not be recognised", error) from None
        if not hmac.compare_digest(proof, self._proof(self._names[1], theirs, own)):
            raise HandoverError("a stranger: it does not have the same handover_key")

    def _proof(self, name: bytes, own: bytes, other: bytes) -> bytes:
        return hmac.digest(self._key, name + own + other, "sha256")

    @property
    def own_host(self) -> str:
        """By which the other process has reached, or could reach, this one."""
        return str(self._socket.getsockname()[0])

    @property
    def other_host(self) -> str:
        return str(self._socket.getpeername()[0])


@dataclass(frozen=True)
class Meeting:
    """Where the group of one delivery meets, on the sender's machine."""

    port: int
    name: str


@contextmanager
def inviting(channel: NetworkChannel) -> Iterator[Peer]:
    """The sender's end. Raises HandoverError where the other does not come or goes."""
    import torch.distributed as dist

    name = secrets.token_hex(16)
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    with _failures():
        store = dist.TCPStore(
            channel.own_host, 0, is_master=True, timeout=timeout, wait_for_workers=False
        )
    channel.send({"planes": {"port": store.port, "name": name}})
    if channel.receive()[0].get("at") != name:
        raise HandoverError("the partner does not speak this protocol")
    with _failures():
        group = _group(store, name, 0, channel.own_host)
    yield Peer(group, rank=1)


@contextmanager
def invited(channel: NetworkChannel, meeting: Meeting) -> Iterator[Peer]:
    """The receiver's end."""
    import torch.distributed as dist

    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    with _failures():
        store = dist.TCPStore(channel.other_host, meeting.port, is_master=False, timeout=timeout)
    channel.send({"at": meeting.name})
    with _failures():
        group = _group(store, meeting.name, 1, channel.own_host)
    yield Peer(group, rank=0)


def meeting_of(header: dict[str, Any]) -> Meeting:
    """Raises HandoverError for a message that invites nobody."""
    told = header.get("planes")
    if not isinstance(told, dict) or type(told.get("port")) is not int:
        raise HandoverError("the partner does not speak this protocol")
    return Meeting(told["port"], str(told.get("name")))


def _group(store: Any, name: str, rank: int, own_host: str) -> Any:
    import torch.distributed as dist

    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    options._devices = [gloo.create_device(hostname=own_host)]
    return gloo(dist.PrefixStore(name, store), rank, 2, options)


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise HandoverError(f"the other process does not come to the group: {reason}") from None
