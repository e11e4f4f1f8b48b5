"""Endpoints: where a server that prefills listens and those that decode ask, and how KV gets from
one to the other: a Unix socket, and descriptors; or a port, and planes by torch.distributed."""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from flexinfer.errors import HandoverError
from flexinfer.handover.channel import Channel, close_files
from flexinfer.handover.network import NetworkChannel, invited, inviting, meeting_of
from flexinfer.handover.parcels import Computed, Delivery, Identity
from flexinfer.handover.plane_views import manager_of, num_bytes_sent
from flexinfer.handover.planes import check_planes, plane_layout, receive_planes, send_planes
from flexinfer.server.handover.socket_path import check_free, check_path, listen
from flexinfer.types import TokensPrompt

if TYPE_CHECKING:
    from flexinfer.engine.handover import EngineHandover

MIN_KEY_CHARS = 16


class Given(Protocol):
    """What is to be sent. Its memory stays until it is closed."""

    num_bytes: int
    num_copied: int

    def send(self, channel: Any) -> None:
        """And close it, in one thread: nobody else may have its files meanwhile."""
        ...


class Taken(Protocol):
    """What has been received, and nobody has adopted yet."""

    tokens: Any
    salt: str

    def adopt(self, handover: EngineHandover, request_id: str) -> int:
        """In the engine's thread; returns bytes."""
        ...

    def close(self) -> None: ...


class Endpoint(Protocol):
    """Blocking calls, but for `check`, `layout` and `listen`. Errors of a partner are
    HandoverError."""

    def check(self) -> None:
        """Raises ValueError for where nobody can listen."""
        ...

    def check_free(self) -> None:
        """Raises OSError where another server listens."""
        ...

    def listen(self) -> socket.socket: ...

    def leave(self) -> None:
        """Nobody listens there any more."""
        ...

    def accept(self, connection: socket.socket, timeout_s: float) -> Channel:
        """Raises HandoverError for a stranger."""
        ...

    def connect(self, timeout_s: float) -> Channel: ...

    def layout(self, handover: EngineHandover) -> str:
        """What must agree. Raises HandoverError for KV that cannot go this way."""
        ...

    def prepare(self, handover: EngineHandover, num_tokens: int) -> None:
        """In the engine's thread, before so many tokens are asked for. Raises OutOfMemoryError
        where they would find no room."""
        ...

    def give(self, handover: EngineHandover, prompt: TokensPrompt) -> Given | None:
        """What is recorded of a prompt; None: nothing."""
        ...

    def take(
        self, channel: Any, header: dict[str, Any], files: list[int], handover: EngineHandover
    ) -> Taken:
        """What the partner sends after this header."""
        ...


@dataclass(frozen=True)
class LocalEndpoint:
    """A Unix socket, through which descriptors go: nothing is copied."""

    path: Path

    def check(self) -> None:
        check_path(self.path)

    def check_free(self) -> None:
        check_free(self.path)

    def listen(self) -> socket.socket:
        return listen(self.path)

    def leave(self) -> None:
        with suppress(OSError):
            self.path.unlink()

    def accept(self, connection: socket.socket, timeout_s: float) -> Channel:
        return Channel(connection, timeout_s)

    def connect(self, timeout_s: float) -> Channel:
        return Channel.connect(str(self.path), timeout_s)

    def layout(self, handover: EngineHandover) -> str:
        return handover.layout

    def prepare(self, handover: EngineHandover, num_tokens: int) -> None:
        """They come in memory of their own, and find room when they are adopted."""

    def give(self, handover: EngineHandover, prompt: TokensPrompt) -> Given | None:
        delivery = handover.export(prompt)
        return None if delivery is None else _GivenParcel(delivery, handover.num_bytes(delivery))

    def take(
        self, channel: Any, header: dict[str, Any], files: list[int], handover: EngineHandover
    ) -> Taken:
        delivery = Delivery.from_message(header, files)
        try:
            handover.identity.check(delivery.identity)
        except HandoverError:
            delivery.close()
            raise
        return _TakenParcel(delivery)


class _GivenParcel:
    def __init__(self, delivery: Delivery, num_bytes: int) -> None:
        self._delivery = delivery
        self.num_bytes, self.num_copied = num_bytes, delivery.num_copied

    def send(self, channel: Channel) -> None:
        try:
            self._delivery.send(channel)
        finally:
            self._delivery.close()


class _TakenParcel:
    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self.tokens, self.salt = delivery.tokens, delivery.salt

    def adopt(self, handover: EngineHandover, request_id: str) -> int:
        num_bytes = handover.num_bytes(self._delivery)
        handover.adopt(self._delivery, request_id)
        return num_bytes

    def close(self) -> None:
        self._delivery.close()


@dataclass(frozen=True)
class NetworkEndpoint:
    """A port, where both sides prove that they know a key; KV goes by torch.distributed."""

    host: str
    port: int
    key: str

    @classmethod
    def of(cls, address: str, key: str | None) -> NetworkEndpoint:
        """address: HOST:PORT, [HOST]:PORT for IPv6. Raises ValueError."""
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"handover_address is HOST:PORT, got {address!r}")
        if key is None or len(key) < MIN_KEY_CHARS:
            raise ValueError(
                "handover_address needs handover_key, the same at both ends, of at least "
                f"{MIN_KEY_CHARS} characters: whoever knows it gets the KV of prompts"
            )
        return cls(host.strip("[]"), int(port), key)

    def check(self) -> None:
        """Nothing more than `of`."""

    def check_free(self) -> None:
        self.listen().close()

    def listen(self) -> socket.socket:
        try:
            listener = socket.create_server((self.host, self.port), family=self._family)
        except OSError as error:
            what = f"handover_address {self.host}:{self.port} cannot be listened at: {error}"
            raise OSError(what) from None
        listener.setblocking(False)
        return listener

    @property
    def _family(self) -> socket.AddressFamily:
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET

    def leave(self) -> None:
        """The port is free already."""

    def accept(self, connection: socket.socket, timeout_s: float) -> NetworkChannel:
        return NetworkChannel(connection, timeout_s, self.key, listens=True)

    def connect(self, timeout_s: float) -> NetworkChannel:
        return NetworkChannel.dial(self.host, self.port, self.key, timeout_s)

    def layout(self, handover: EngineHandover) -> str:
        check_planes(handover.manager)
        return plane_layout(handover.manager)

    def prepare(self, handover: EngineHandover, num_tokens: int) -> None:
        manager = handover.manager
        state_bytes = manager.spec.state_bytes(manager.chunk_bytes)
        handover.check_room(manager.bytes_for(num_tokens) + state_bytes)

    def give(self, handover: EngineHandover, prompt: TokensPrompt) -> Given | None:
        found = handover.recorded(prompt)
        return None if found is None else _GivenPlanes(handover.identity, found)

    def take(
        self, channel: Any, header: dict[str, Any], files: list[int], handover: EngineHandover
    ) -> Taken:
        close_files(files)
        with invited(channel, meeting_of(header)) as peer:
            return _TakenPlanes(receive_planes(peer, handover.identity, handover.manager))


class _GivenPlanes:
    num_copied = 0

    def __init__(self, identity: Identity, computed: Computed) -> None:
        self._identity, self._computed = identity, computed
        self.num_bytes = _bytes_of(computed)

    def send(self, channel: NetworkChannel) -> None:
        try:
            with inviting(channel) as peer:
                send_planes(peer, self._identity, self._computed)
        finally:
            self._computed.release()


class _TakenPlanes:
    def __init__(self, computed: Computed) -> None:
        self._computed = computed
        self.tokens, self.salt = computed.tokens, computed.salt

    def adopt(self, handover: EngineHandover, request_id: str) -> int:
        num_bytes = _bytes_of(self._computed)
        handover.record(self._computed, request_id)
        return num_bytes

    def close(self) -> None:
        self._computed.release()


def _bytes_of(computed: Computed) -> int:
    """Without what is left of chunks."""
    return num_bytes_sent(manager_of(computed.vtensor), len(computed.tokens))


def endpoint_of(path: Path | None, address: str | None, key: str | None) -> Endpoint | None:
    """Raises ValueError for settings of which none can be made; None: there is no partner."""
    if path is not None:
        return LocalEndpoint(path)
    return None if address is None else NetworkEndpoint.of(address, key)
