"""Two processes and one memory: whoever is killed at whatever step, the other one is right, and
nothing is left when it has released what it had."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexinfer.errors import HandoverError
from flexinfer.handover.channel import Channel, close_files
from flexinfer.handover.parcels import Delivery
from helpers import device_param as kv_device
from helpers import handover_peer
from helpers.handover_peer import (
    IDENTITY,
    RECEIVER_STEPS,
    SENDER_STEPS,
    TOKENS,
    open_manager,
    values,
    write,
)
from helpers.open_files import open_files

TIMEOUT_S = 120.0


class Peer:
    """The other process, and the socket where it is waited for."""

    def __init__(self, role: str, folder: Path) -> None:
        self.path = str(folder / "socket")
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.settimeout(TIMEOUT_S)
        self.listener.bind(self.path)
        self.listener.listen()
        arguments = [sys.executable, handover_peer.__file__, role, self.path]
        self.process = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": str(Path(handover_peer.__file__).parents[1]),
                "STANDIN_CUDA_GRANULARITY_BYTES": str(handover_peer.CHUNK),
            },
        )

    def accept(self) -> Channel:
        return Channel(self.listener.accept()[0], TIMEOUT_S)

    def wait_for(self, step: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == step

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.listener.close()


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[dict[str, Peer]]:
    before = open_files()
    started: dict[str, Peer] = {}
    for role in ("send", "receive"):
        (tmp_path / role).mkdir()
    try:
        yield started
    finally:
        for peer in started.values():
            peer.kill()
    assert not open_files() - before


class Watch:
    """Tells whether there is memory behind a file that was sent, holding none of it."""

    def __init__(self, file: int) -> None:
        self.inode = os.fstat(file).st_ino
        self.file = -1
        if kv_device.current() == "cpu":
            self.file = os.open(f"/proc/self/fd/{file}", os.O_RDWR)

    def is_there(self) -> bool:
        if self.file >= 0:
            return os.fstat(self.file).st_blocks > 0
        # A GPU's goes with the last file and the last mapping, of this process where it is alone.
        mapped = {line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines()}
        return str(self.inode) in mapped or self.inode in {inode for _, inode in open_files()}

    def end(self) -> None:
        if self.file >= 0:
            os.close(self.file)


@pytest.mark.usefixtures("kv_device")
@pytest.mark.parametrize("last_step", RECEIVER_STEPS)
def test_a_receiver_that_is_killed_takes_nothing_along(
    last_step: str, peers: dict[str, Peer], tmp_path: Path
) -> None:
    peer = peers["receive"] = Peer("receive", tmp_path / "receive")
    with open_manager() as manager:
        vtensor = manager.create(to_export=True)
        write(vtensor, 0, 10, 1)
        parcel = manager.export(vtensor)
        assert parcel.num_copied == 0
        watch = Watch(parcel.files[0])
        with peer.accept() as channel:
            for name in RECEIVER_STEPS:
                peer.wait_for(name)
                if name == "connected":
                    Delivery(IDENTITY, TOKENS, "", parcel).send(channel)
                    parcel.close()
                if name == last_step:
                    break
                peer.go_on()
            peer.kill()
        assert values(vtensor) == [1] * 10
        write(vtensor, 10, 12, 3)
        assert values(vtensor) == [1] * 10 + [3] * 2
        assert watch.is_there()
        vtensor.release()
        manager.trim()
        assert not watch.is_there()
        watch.end()
        manager.check_integrity()


@pytest.mark.usefixtures("kv_device")
@pytest.mark.parametrize("last_step", SENDER_STEPS)
def test_what_a_killed_sender_has_sent_stays(
    last_step: str, peers: dict[str, Peer], tmp_path: Path
) -> None:
    peer = peers["send"] = Peer("send", tmp_path / "send")
    with open_manager() as manager:
        for name in SENDER_STEPS[: SENDER_STEPS.index(last_step)]:
            peer.wait_for(name)
            peer.go_on()
        peer.wait_for(last_step)
        if last_step == "exported":
            peer.kill()
            return
        with peer.accept() as channel:
            if last_step in ("sent", "released"):
                with pytest.raises(HandoverError, match="within a message"):
                    channel.receive()
            else:
                peer.kill()
                with pytest.raises(HandoverError, match="within a message"):
                    channel.receive()
                return
        with peer.accept() as channel:
            peer.kill()
            header, files = channel.receive()
        watch = Watch(files[0])
        delivery = Delivery.from_message(header, files)
        assert delivery.tokens == TOKENS
        vtensor = delivery.adopt(IDENTITY, manager).vtensor
        write(vtensor, 10, 14, 2)
        assert values(vtensor) == [1] * 10 + [2] * 4
        assert manager.stats().chunks_copied == 0
        vtensor.release()
        manager.trim()
        assert not watch.is_there()
        watch.end()


def test_the_memory_is_counted_once(peers: dict[str, Peer], tmp_path: Path) -> None:
    """Of what two processes map, each has a half in its proportional set size."""
    peer = peers["receive"] = Peer("receive", tmp_path / "receive")
    with open_manager() as manager:
        vtensor = manager.create(to_export=True)
        write(vtensor, 0, 10, 1)
        with peer.accept() as channel:
            peer.wait_for("connected")
            alone = _parcel_pss("self")
            with_parcel = manager.export(vtensor)
            Delivery(IDENTITY, TOKENS, "", with_parcel).send(channel)
            with_parcel.close()
            for name in ("received", "adopted"):
                peer.go_on()
                peer.wait_for(name)
            values(vtensor)
            together = _parcel_pss("self") + _parcel_pss(str(peer.process.pid))
        assert alone > 0
        assert together <= alone


def test_a_parcel_of_another_engine_is_refused(peers: dict[str, Peer], tmp_path: Path) -> None:
    peer = peers["send"] = Peer("send", tmp_path / "send")
    for name in SENDER_STEPS[:3]:
        peer.wait_for(name)
        peer.go_on()
    peer.wait_for("sent")
    peer.accept().close()
    with peer.accept() as channel, open_manager() as manager:
        header, files = channel.receive()
        delivery = Delivery.from_message(header, files)
        with pytest.raises(HandoverError, match="the parcel's model is 'model'"):
            delivery.adopt(handover_peer.Identity("other", "tokenizer"), manager)
        delivery.close()
        assert manager.stats().chunks_received == 0


def _parcel_pss(process: str) -> int:
    """KiB of mapped memfds, shared ones counted by the part that is this process's."""
    total, inside = 0, False
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = "/memfd:vtensor" in line
        elif inside and line.startswith("Pss:"):
            total += int(line.split()[1])
    return total


def test_what_is_no_message_is_refused() -> None:
    for sent, why in (
        (b"GET / HTTP/1.1\r\n\r\n", "does not speak"),
        (b"FXHAND2\n\xff\xff\xff\xff", "too long"),
        (b"FXHAND2\n\0\0\0\2{]", "could not be received"),
        (b"FXHAND2\n\0\0\0\2{}", "not as many"),
        (b"FXHAND2\n\0\0\0\x09", "within a message"),
    ):
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        far.sendall(sent)
        far.close()
        with Channel(near, TIMEOUT_S) as channel, pytest.raises(HandoverError, match=why):
            channel.receive()


def test_files_that_nobody_announced_are_closed() -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    before = open_files()
    with far, Channel(near, TIMEOUT_S) as channel:
        socket.send_fds(far, [b"FXHAND2\n\0\0\0\x0f" + b'{"num_files":0}'], [0, 1])
        with pytest.raises(HandoverError, match="2 files came"):
            channel.receive()
        assert not open_files() - before
        Channel(far, TIMEOUT_S).send({"hello": 1}, [0] * 600)  # more than go at once
        header, files = channel.receive()
        assert (header["hello"], len(files)) == (1, 600)
        close_files(files)
