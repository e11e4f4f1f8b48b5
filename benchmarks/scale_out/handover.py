"""KV of 4,096 tokens from one process to another: by descriptors, with copies, over a network.

    python benchmarks/scale_out/handover.py --json FILE

Two processes of this machine. Over gloo's loopback, one send per plane is measured against one per
16-token block, which is what a paged cache has to send, all of them under way at once. Times are
the receiver's, from its question to the last byte; memory is fresh each time.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import torch
import torch.distributed as dist
from provenance import write_report

from flexinfer.handover.channel import Channel
from flexinfer.handover.parcels import Computed, Delivery, Identity
from flexinfer.handover.plane_views import PlaneViews
from flexinfer.handover.planes import Peer, receive_planes, send_planes
from flexinfer.vtensor import KVSpec, VTensor, VTensorManager

IDENTITY = Identity("benchmark", "none")
BLOCK_TOKENS = 16
LAYOUTS = {"interleaved": 16, "dense": 1}
"""layers_per_plane: all side by side, or K and V of each layer in ranges of their own."""


def open_manager(layers_per_plane: int, num_tokens: int) -> VTensorManager:
    spec = KVSpec(16, 8, 64, "bfloat16", max_seq_len=num_tokens, layers_per_plane=layers_per_plane)
    needed = spec.bytes_per_token * num_tokens
    return VTensorManager(spec, max_requests=4, memory_budget=3 * needed)


def num_bytes(manager: VTensorManager) -> int:
    return manager.spec.bytes_per_token * manager.spec.max_seq_len


def fill(manager: VTensorManager, num_tokens: int, *, to_export: bool) -> VTensor:
    vtensor = manager.create(to_export=to_export)
    vtensor.extend(num_tokens)
    with PlaneViews(vtensor) as planes:
        for number, plane in enumerate(planes):
            plane.fill_(number + 1)
    return vtensor


def blocks(plane: torch.Tensor, num_tokens: int) -> list[torch.Tensor]:
    return list(plane.view(num_tokens // BLOCK_TOKENS, -1).unbind())


def send(peer: Peer, path: str, num_tokens: int) -> None:
    """The other process: does what it is asked for, until it is asked for nothing."""
    tokens = list(range(num_tokens))
    while True:
        kind, layout = peer.receive_text().split()
        if kind == "end":
            return
        with open_manager(LAYOUTS[layout], num_tokens) as manager:
            vtensor = fill(manager, num_tokens, to_export=kind == "descriptors")
            peer.send_text("ready")
            peer.receive_text()
            if kind in ("descriptors", "copies"):
                parcel = manager.export(vtensor)
                wanted = 0 if kind == "descriptors" else parcel.num_chunks
                assert parcel.num_copied == wanted
                delivery = Delivery(IDENTITY, tokens, "", parcel)
                with Channel.connect(path, 30) as channel:
                    delivery.send(channel)
                delivery.close()
            elif kind == "planes":
                send_planes(peer, IDENTITY, Computed(vtensor, tokens, ""))
            else:
                with PlaneViews(vtensor) as planes:
                    parts = [part for plane in planes for part in blocks(plane, num_tokens)]
                    peer.send(*parts)
            peer.receive_text()
            vtensor.release()


def receive(peer: Peer, listener: socket.socket, kind: str, layout: str, num_tokens: int) -> float:
    """Seconds of one hand-over; what came is compared with what was sent."""
    peer.send_text(f"{kind} {layout}")
    with open_manager(LAYOUTS[layout], num_tokens) as manager:
        peer.receive_text()
        begin = time.perf_counter()
        peer.send_text("go")
        if kind in ("descriptors", "copies"):
            with Channel(listener.accept()[0], 30) as channel:
                delivery = Delivery.from_message(*channel.receive())
            is_whole = delivery.parcel.num_chunks * manager.chunk_bytes >= num_bytes(manager)
            assert is_whole, "less was handed over than there is"
            vtensor = delivery.adopt(IDENTITY, manager).vtensor
        elif kind == "planes":
            vtensor = receive_planes(peer, IDENTITY, manager).vtensor
        else:
            vtensor = manager.create()
            vtensor.extend(num_tokens)
            with PlaneViews(vtensor) as planes:
                parts = [part for plane in planes for part in blocks(plane, num_tokens)]
                peer.receive(*parts)
        seconds = time.perf_counter() - begin
        with PlaneViews(vtensor) as planes:
            assert all(bool((plane == i + 1).all()) for i, plane in enumerate(planes))
        peer.send_text("done")
        vtensor.release()
    return seconds


def join(store: str, rank: int) -> Peer:
    group = dist.ProcessGroupGloo(dist.FileStore(store, 2), rank, 2, timedelta(seconds=60))
    return Peer(group, 1 - rank)


def measure(num_tokens: int, rounds: int) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        path, store = f"{folder}/socket", f"{folder}/store"
        listener.bind(path)
        listener.listen()
        other = subprocess.Popen(
            [sys.executable, __file__, "--tokens", str(num_tokens), "--send", store, path]
        )
        try:
            peer = join(store, 0)
            for layout, layers_per_plane in LAYOUTS.items():
                for kind in ("descriptors", "copies", "planes", "blocks"):
                    seconds = [
                        receive(peer, listener, kind, layout, num_tokens) for _ in range(rounds + 1)
                    ][1:]  # the first one warms up
                    with open_manager(layers_per_plane, num_tokens) as manager:
                        spec = manager.spec
                    num_blocks = spec.num_planes * (num_tokens // BLOCK_TOKENS)
                    rows.append(
                        {
                            "layout": layout,
                            "how": kind,
                            "num_bytes": spec.bytes_per_token * num_tokens,
                            "sends": {"planes": spec.num_planes, "blocks": num_blocks}.get(kind, 1),
                            "median_ms": round(statistics.median(seconds) * 1e3, 2),
                            "least_ms": round(min(seconds) * 1e3, 2),
                            "most_ms": round(max(seconds) * 1e3, 2),
                        }
                    )
                    print(rows[-1], file=sys.stderr)
            peer.send_text("end interleaved")
            other.wait(60)
        finally:
            other.kill()
            other.wait()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--send", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.send:
        send(join(arguments.send[0], 1), arguments.send[1], arguments.tokens)
        return
    before = [round(value, 1) for value in os.getloadavg()]
    rows = measure(arguments.tokens, arguments.rounds)
    settings = {"tokens": arguments.tokens, "rounds": arguments.rounds}
    body = {"settings": settings, "rows": rows}
    write_report(arguments.json, "scale_out_handover", body, load_before=before)


if __name__ == "__main__":
    main()
