"""The other process of a hand-over: says each step it has come to, and waits to be told to go on.

python handover_peer.py send|receive SOCKET
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

import numpy

from flexinfer.handover.channel import Channel
from flexinfer.handover.parcels import Delivery, Identity
from flexinfer.vtensor import KVSpec, VTensor, VTensorManager
from helpers import dlpack

CHUNK = 4096
SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=32, max_seq_len=64)
IDENTITY = Identity("model", "tokenizer")
TOKENS = list(range(10))
RECEIVER_STEPS = ("connected", "received", "adopted", "written on", "released")
SENDER_STEPS = ("exported", "connected", "begun", "sent", "released")


def open_manager() -> VTensorManager:
    """On the stand-in for a GPU, where one is named. Without torch, which takes long to import."""
    device: dict[str, Any] = {"from_dlpack": numpy.from_dlpack}
    if "FLEXINFER_LIBCUDA" in os.environ:
        device = {"device": "cuda", "from_dlpack": dlpack.host_array}
    return VTensorManager(
        SPEC, max_requests=4, memory_budget=64 * CHUNK, chunk_bytes=CHUNK, **device
    )


def write(vtensor: VTensor, start: int, end: int, value: float) -> None:
    vtensor.extend(end)
    for layer in range(2):
        vtensor.k(layer)[start:end] = value
        vtensor.v(layer)[start:end] = -value


def values(vtensor: VTensor) -> list[float]:
    return [float(value) for value in vtensor.k(1)[:, 0, 0]]


def step(name: str) -> None:
    print(name, flush=True)
    if not sys.stdin.readline():
        raise SystemExit("nobody is there any more")


def receive(path: str) -> None:
    with open_manager() as manager, Channel.connect(path, 30) as channel:
        step("connected")
        header, files = channel.receive()
        step("received")
        vtensor = Delivery.from_message(header, files).adopt(IDENTITY, manager).vtensor
        assert values(vtensor) == [1] * 10
        step("adopted")
        write(vtensor, 10, 14, 2)
        step("written on")
        vtensor.release()
        manager.trim()
        step("released")


def send(path: str) -> None:
    with open_manager() as manager:
        vtensor = manager.create(to_export=True)
        write(vtensor, 0, 10, 1)
        parcel = manager.export(vtensor)
        step("exported")
        with Channel.connect(path, 30) as channel:
            step("connected")
            # A sender that dies within a message, whose files are there already.
            socket.send_fds(channel._socket, [b"FXHA"], list(parcel.files))
            step("begun")
        with Channel.connect(path, 30) as channel:
            Delivery(IDENTITY, TOKENS, "", parcel).send(channel)
            step("sent")
            parcel.close()
            vtensor.release()
            manager.trim()
            step("released")


if __name__ == "__main__":
    {"send": send, "receive": receive}[sys.argv[1]](sys.argv[2])
