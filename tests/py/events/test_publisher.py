"""EventPublisher: what ZMQ subscribers hear of a manager, also those that miss messages."""

from __future__ import annotations

import builtins
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

zmq = pytest.importorskip("zmq")
msgspec = pytest.importorskip("msgspec")

from flexinfer.events.config import KVEventsConfig
from flexinfer.events.publisher import EventPublisher
from flexinfer.vtensor import KVSpec, VTensorManager
from helpers.block_subscriber import KnownBlocks

TIMEOUT_MS = 120_000


class Subscriber:
    """As routers do it: messages in order, those missed asked for again."""

    def __init__(self, publisher: EventPublisher, topic: str = "") -> None:
        self.known = KnownBlocks()
        self.next_number = 0
        self.num_replayed = 0
        self._context = zmq.Context()
        self._sub = self._socket(zmq.SUB, publisher.endpoint)
        self._sub.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._replay = self._socket(zmq.DEALER, publisher.replay_endpoint)

    def _socket(self, kind: int, endpoint: str | None) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        return socket

    def is_connected(self) -> bool:
        return bool(self._sub.poll(timeout=20))

    def hear(self, rng: random.Random) -> None:
        """Take one message, or lose it."""
        _, number, payload = self._sub.recv_multipart()
        if rng.random() < 0.7:
            self._take(int.from_bytes(number, "big"), payload)

    def catch_up(self) -> None:
        self._replay.send_multipart([b"", self.next_number.to_bytes(8, "big")])
        while True:
            _, number, payload = self._replay.recv_multipart()
            if not payload:
                assert number == b"\xff" * 8
                return
            self.num_replayed += 1
            self._apply(int.from_bytes(number, "big"), payload)

    def catch_up_with(self, manager: VTensorManager) -> None:
        """With what the publisher's thread is about to publish, too."""
        prefixes = manager.snapshot().prefixes
        recorded = {block for prefix in prefixes for block in prefix.blocks}
        end = time.monotonic() + TIMEOUT_MS / 1000
        while self.known.paths.keys() != recorded and time.monotonic() < end:
            self.catch_up()
        self.known.check(manager)

    def _take(self, number: int, payload: bytes) -> None:
        if number > self.next_number:
            self.catch_up()
        if number >= self.next_number:
            self._apply(number, payload)

    def _apply(self, number: int, payload: bytes) -> None:
        _, events, _ = msgspec.msgpack.decode(payload)
        is_complete = events[0]["type"] == "AllBlocksCleared"
        if number == self.next_number or is_complete:  # else what came before is lost for good
            for event in events:
                self.known.apply(event)
            self.next_number = number + 1

    def close(self) -> None:
        self._context.destroy()


@pytest.fixture
def manager() -> Iterator[VTensorManager]:
    spec = KVSpec(1, 1, 40, "float32", 200)
    with VTensorManager(spec, "sim", memory_budget=80 * 4096, chunk_bytes=4096) as opened:
        yield opened


def config_in(folder: Path, **changes: Any) -> KVEventsConfig:
    given = {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{folder}/events",
        "replay_endpoint": f"ipc://{folder}/replay",
        **changes,
    }
    return KVEventsConfig.parse(given)


def record(manager: VTensorManager, rng: random.Random) -> None:
    tokens = [rng.randrange(3) for _ in range(rng.randint(16, 200))]  # a block, to be told
    vtensor = manager.create(tokens)
    vtensor.extend(len(tokens))
    vtensor.record_prefix(tokens)
    vtensor.release()


def test_who_loses_a_third_of_the_messages_still_knows_what_is_recorded(
    manager: VTensorManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexinfer.events.publisher.MIN_INTERVAL_S", 0)
    publisher = EventPublisher(config_in(tmp_path, topic="kv"))
    subscriber = Subscriber(publisher, topic="kv")
    publisher.start(manager)
    rng = random.Random(3)
    while not subscriber.is_connected():
        record(manager, rng)
    for _ in range(100):
        for _ in range(5):
            record(manager, rng)
        subscriber.hear(rng)
    subscriber.catch_up_with(manager)
    assert subscriber.num_replayed > 5
    subscriber.close()
    publisher.close()


@pytest.mark.parametrize("buffer_steps", [10_000, 2], ids=["all kept", "too long away"])
def test_who_was_away_catches_up(
    manager: VTensorManager,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    buffer_steps: int,
) -> None:
    """However long: what is no longer kept is told anew."""
    monkeypatch.setattr("flexinfer.events.publisher.MIN_INTERVAL_S", 0)
    publisher = EventPublisher(config_in(tmp_path, buffer_steps=buffer_steps))
    publisher.start(manager)
    rng = random.Random(4)
    witness = Subscriber(publisher)
    while witness.next_number < 20:
        record(manager, rng)
        witness.catch_up()
    subscriber = Subscriber(publisher)
    for _ in range(3):
        subscriber.catch_up_with(manager)
        assert subscriber.known.paths
        record(manager, rng)
    for each in (subscriber, witness):
        each.close()
    publisher.close()


def test_what_is_published_is_what_vllm_publishes(manager: VTensorManager, tmp_path: Path) -> None:
    """Captured from vLLM 0.26: an array with the time, the events and the rank; maps in it."""
    publisher = EventPublisher(config_in(tmp_path))
    publisher.start(manager)
    tokens = list(range(40))
    vtensor = manager.create(tokens, cache_salt="tenant")
    vtensor.extend(40)
    vtensor.record_prefix(tokens)
    manager.unwatch_blocks()
    publisher._threads[0].join()
    batches = [msgspec.msgpack.decode(payload) for _, payload, _ in publisher._kept]
    publisher.close()
    assert all(rank == 0 and ts > 1.7e9 for ts, _, rank in batches)
    cleared, stored = [event for _, events, _ in batches for event in events]
    assert cleared == {"type": "AllBlocksCleared"}
    hashes = stored.pop("block_hashes")
    assert len(hashes) == 2
    assert all(0 <= block < 2**64 for block in hashes)
    assert stored == {
        "type": "BlockStored",
        "parent_block_hash": None,
        "token_ids": tokens[:32],
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [["tenant"], None],
    }


def test_a_request_that_is_none_is_passed_over(
    manager: VTensorManager, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = EventPublisher(config_in(tmp_path))
    publisher.start(manager)
    subscriber = Subscriber(publisher)
    subscriber._replay.send_multipart([b"what?"])
    subscriber.catch_up()
    assert subscriber.next_number == 1
    assert "not one sequence number" in caplog.text
    subscriber.close()
    publisher.close()


def test_an_address_in_use_is_refused_and_free_after_a_close(
    manager: VTensorManager, tmp_path: Path
) -> None:
    publisher = EventPublisher(config_in(tmp_path, endpoint="tcp://127.0.0.1:*"))
    taken = publisher.endpoint.replace("127.0.0.1", "*")
    with pytest.raises(ValueError, match=r"cannot listen at tcp://\*:\d+: Address already in use"):
        EventPublisher(config_in(tmp_path, endpoint=taken))
    publisher.start(manager)
    publisher.close()
    EventPublisher(config_in(tmp_path, endpoint=taken)).close()


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_zmq(name: str, *args: Any) -> Any:
        if name == "zmq":
            raise ModuleNotFoundError("No module named 'zmq'", name="zmq")
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without_zmq)
    with pytest.raises(ValueError, match=r"needs zmq: pip install 'flexinfer\[events\]'"):
        EventPublisher(config_in(tmp_path))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "kv_events_config is no JSON"),
        ({"enable_events": True}, "enable_events, which is not supported; it may have enable_kv_"),
        ({"enable_kv_cache_events": "yes"}, "must be true or false, got 'yes'"),
        ({"publisher": "kafka"}, "publisher must be one of 'zmq', 'null', got 'kafka'"),
        ({"buffer_steps": 0}, "buffer_steps must be a positive integer"),
        ({"hwm": True}, "hwm must be a positive integer"),
        ({"endpoint": "5557"}, r"endpoint must be an address such as tcp://\*:5557, got '5557'"),
        ({"replay_endpoint": "tcp://*:5557"}, "endpoint and replay_endpoint are both"),
        ({"topic": 3}, "topic must be a string"),
        ([], "must be a mapping"),
    ],
)
def test_bad_settings_are_refused_by_name(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVEventsConfig.parse(given)
