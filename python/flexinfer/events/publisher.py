"""EventPublisher: KV events over ZMQ, in vLLM's protocol.

    PUB     topic, sequence number (8 bytes, big-endian), batch
    ROUTER  asked for a sequence number: every batch from there on, then number -1 without a batch

Two threads of its own: one waits for the manager's events and publishes them, at most a batch in
`MIN_INTERVAL_S`; the other answers those who have missed some. The engine's thread does nothing.

A subscriber may have been away for any time: where the batches that it asks for are no longer
kept, everything is published again, as one batch that begins with AllBlocksCleared.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexinfer.events.config import KVEventsConfig
    from flexinfer.vtensor import VTensorManager

logger = logging.getLogger(__name__)

MIN_INTERVAL_S = 0.01
"""Between two batches: what a step changes goes in one, and the GIL is asked for less often."""
RETELL_TIMEOUT_S = 5.0
END = (-1).to_bytes(8, "big", signed=True)


class EventPublisher:
    """Listens from the start; publishes between `start` and `close`."""

    def __init__(self, config: KVEventsConfig) -> None:
        """Raises ValueError for a missing package or an address that cannot be had."""
        try:
            import msgspec
            import zmq
        except ImportError as error:
            raise ValueError(
                f"kv_events_config needs {error.name}: pip install 'flexinfer[events]'"
            ) from None
        self._zmq: Any = zmq
        self._encode = msgspec.msgpack.Encoder().encode
        self._topic = config.topic.encode()
        self._kept: deque[tuple[int, bytes, bool]] = deque(maxlen=config.buffer_steps)
        self._published = threading.Condition()  # guards _kept
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._manager: VTensorManager | None = None
        self._context = zmq.Context()
        try:
            self._pub = self._context.socket(zmq.PUB)
            self._pub.set_hwm(config.hwm)
            self._open(self._pub, config.endpoint, may_connect=True)
            self._router: Any = None
            if config.replay_endpoint is not None:
                self._router = self._context.socket(zmq.ROUTER)
                self._router.setsockopt(zmq.SNDHWM, 0)  # an answer is whole, however long
                self._open(self._router, config.replay_endpoint, may_connect=False)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    @property
    def endpoint(self) -> str:
        """Where it publishes, with the port that was found."""
        return str(self._pub.getsockopt_string(self._zmq.LAST_ENDPOINT))

    @property
    def replay_endpoint(self) -> str | None:
        if self._router is None:
            return None
        return str(self._router.getsockopt_string(self._zmq.LAST_ENDPOINT))

    def start(self, manager: VTensorManager) -> None:
        """Publish what is recorded in this manager, and what becomes of it."""
        self._manager = manager
        manager.watch_blocks()
        targets = [self._publish_all] + ([self._answer_all] if self._router is not None else [])
        for target in targets:
            name = f"flexinfer-{target.__name__.strip('_')}"
            thread = threading.Thread(target=target, args=(manager,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Publish what is left; returns when the addresses are free again."""
        self._stopping.set()
        if self._manager is not None:
            self._manager.unwatch_blocks()
        if self._threads:
            self._threads[0].join()
        self._pub.close(linger=1000)
        if len(self._threads) < 2 and self._router is not None:
            self._router.close(linger=0)
        self._context.term()  # ends the waiting of the thread that answers
        for thread in self._threads:
            thread.join()

    def _open(self, socket: Any, address: str, *, may_connect: bool) -> None:
        is_connected = may_connect and not (
            "*" in address or "::" in address or address.startswith(("ipc://", "inproc://"))
        )
        try:
            socket.connect(address) if is_connected else socket.bind(address)
        except self._zmq.ZMQError as error:
            verb = "connect to" if is_connected else "listen at"
            raise ValueError(f"kv_events_config: cannot {verb} {address}: {error}") from None

    def _publish_all(self, manager: VTensorManager) -> None:
        from flexinfer.events.messages import Batch, message_of, tells_everything

        number = 0
        while (events := manager.take_block_events(timeout_s=60.0)) is not None:
            if not events:
                continue
            batch: Batch = (time.time(), [message_of(event) for event in events], 0)
            payload = self._encode(batch)
            with self._published:
                self._kept.append((number, payload, tells_everything(events)))
                self._published.notify_all()
            self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
            number += 1
            self._stopping.wait(MIN_INTERVAL_S)

    def _answer_all(self, manager: VTensorManager) -> None:
        """Ends with the context."""
        try:
            while True:
                frames = self._router.recv_multipart()
                if len(frames) != 3 or len(frames[2]) != 8:
                    logger.warning("a request for KV events is not one sequence number: %r", frames)
                    continue
                client, empty, first = frames
                for number, payload in self._batches_from(int.from_bytes(first, "big"), manager):
                    self._router.send_multipart((client, empty, number, payload))
                self._router.send_multipart((client, empty, END, b""))
        except self._zmq.ContextTerminated:
            self._router.close(linger=0)

    def _batches_from(self, first: int, manager: VTensorManager) -> list[tuple[bytes, bytes]]:
        with self._published:
            if self._kept and self._kept[0][0] > first and not self._keeps_everything():
                manager.retell_blocks()
                self._published.wait_for(self._keeps_everything, RETELL_TIMEOUT_S)
            kept = [batch for batch in self._kept if batch[0] >= first]
        return [(number.to_bytes(8, "big"), payload) for number, payload, _ in kept]

    def _keeps_everything(self) -> bool:
        return any(is_everything for _, _, is_everything in self._kept)
