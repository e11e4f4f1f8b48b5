"""Planes over torch.distributed of layers that differ: several shapes, and windows that give memory
back, of which only what they keep is sent."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer.errors import HandoverError
from flexinfer.handover.parcels import Computed, Identity
from flexinfer.handover.planes import Peer, receive_planes, send_planes
from flexinfer.vtensor import KVGroup, KVSpec, VTensor, VTensorManager
from flexinfer.vtensor.open_core import NO_CHUNK
from helpers.gloo_pair import together

IDENTITY = Identity("model", "tokenizer")
CHUNK = 4096
FULL = KVGroup((0, 3), 2, 32, 32, layers_per_plane=1)
HALF = KVGroup((1,), 2, 32, 32, "bfloat16")
LATENT = KVGroup((2,), 1, 48, 0, "float16")
NEAR = KVGroup((4, 5), 2, 32, 32, window=20)
DENSE = KVGroup((6, 7), 2, 32, 32, window=40, layers_per_plane=1)
SPARE = KVGroup((8, 9, 10), 1, 32, 32, window=24, layers_per_plane=2)
SPECS = {
    "shapes": (FULL, HALF, LATENT),
    "a window": (FULL, NEAR),
    "windows alone": (NEAR, DENSE),
    "windows and shapes": (FULL, HALF, LATENT, NEAR, DENSE, SPARE),
}


def open_manager(name: str, **options: Any) -> VTensorManager:
    spec = KVSpec.of_groups(SPECS[name], max_seq_len=256)
    given = {"max_requests": 4, "memory_budget": 4 << 20, "chunk_bytes": CHUNK, **options}
    return VTensorManager(spec, **given)


def views(vtensor: VTensor) -> list[tuple[int | None, Any]]:
    """Each tensor of each layer, and its window."""
    manager = vtensor._manager
    return [
        (group.window, view)
        for group in manager.spec.groups
        for layer in group.layers
        for view in (vtensor.k(layer), *([vtensor.v(layer)] if group.value_dim else []))
    ]


def computed(manager: VTensorManager, num_tokens: int, seed: int) -> VTensor:
    """A vTensor as a request leaves it that computed so many tokens, a few at a time."""
    vtensor, rng = manager.create(), Random(seed)
    while vtensor.num_tokens < num_tokens:
        start = vtensor.num_tokens
        vtensor.extend(min(num_tokens, start + rng.randint(1, 30)))
        for _, view in views(vtensor):
            view[start:] = torch.rand(view[start:].shape).to(view.dtype)
            del view
        manager.forget([vtensor], [vtensor.num_tokens])
        manager.drain()
    return vtensor


def same(sent: VTensor, received: VTensor, num_tokens: int) -> bool:
    """Whether all that queries from token num_tokens on read is equal."""
    pairs = zip(views(sent), views(received), strict=True)
    return all(
        torch.equal(a[first:num_tokens], b[first:num_tokens])
        for (window, a), (_, b) in pairs
        for first in (0 if window is None else max(0, num_tokens + 1 - window),)
    )


def given_back(vtensor: VTensor) -> list[bool]:
    (table,) = [v.table for v in vtensor._manager.snapshot().vtensors if v.id == vtensor.id]
    assert table
    return [chunk == NO_CHUNK for chunk in table]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", SPECS)
def test_each_plane_is_one_send_and_the_receivers_vtensor_is_as_the_senders(
    name: str, seed: int, peers: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tokens = Random(f"{name} {seed}").randint(1, 250)
    tokens = list(range(num_tokens))
    sent: list[int] = []
    send = Peer.send

    def count(peer: Peer, *tensors: Any) -> None:
        if tensors[0].dtype == torch.uint8 and len(tensors) > 1:
            sent.extend(tensor.numel() for tensor in tensors)
        send(peer, *tensors)

    monkeypatch.setattr(Peer, "send", count)
    less = {"step_tokens": 16, "park": False}
    with open_manager(name) as sender, open_manager(name, **less) as receiver:
        computed(receiver, 100, seed).release()  # chunks that others have written to are recycled
        vtensor = computed(sender, num_tokens, seed)
        error, answer = together(
            lambda: send_planes(peers[0], IDENTITY, Computed(vtensor, tokens, "")),
            lambda: receive_planes(peers[1], IDENTITY, receiver),
        )
        assert error is None, error
        received = answer.vtensor
        assert same(vtensor, received, num_tokens)
        assert given_back(received) == given_back(vtensor)
        assert received.info().mapped_bytes == vtensor.info().mapped_bytes
        assert len(sent) <= sender.spec.num_planes
        assert sum(sent) <= vtensor.info().mapped_bytes
        check_records(vtensor, received, tokens)


def check_records(vtensor: VTensor, received: VTensor, tokens: list[int]) -> None:
    """Recorded, both are found at the same lengths, with the same contents, and go on."""
    sender, receiver = vtensor._manager, received._manager
    assert isinstance(sender, VTensorManager)
    assert isinstance(receiver, VTensorManager)
    for one in (vtensor, received):
        one.record_prefix(tokens)
    for length in range(1, len(tokens) + 1):
        found = receiver.match_prefix(tokens[:length])
        assert found == sender.match_prefix(tokens[:length])
        if found and length % 7 == 0:
            first, second = (m.create(tokens[:length]) for m in (sender, receiver))
            assert same(first, second, found)
            first.release()
            second.release()
    received.extend(min(256, len(tokens) + 9))
    for manager in (sender, receiver):
        manager.check_integrity()


def test_what_a_window_has_left_is_not_sent_and_needs_no_memory_there(
    peers: tuple[Peer, Peer],
) -> None:
    num_tokens = 250
    with open_manager("a window") as sender:
        vtensor = computed(sender, num_tokens, 0)
        with open_manager("a window", step_tokens=16) as asked:
            needed = asked.bytes_for(num_tokens)
        assert needed < 0.75 * sender.bytes_for(num_tokens)  # at once
        with open_manager("a window", memory_budget=needed, step_tokens=16) as receiver:
            _, answer = together(
                lambda: send_planes(
                    peers[0], IDENTITY, Computed(vtensor, list(range(num_tokens)), "")
                ),
                lambda: receive_planes(peers[1], IDENTITY, receiver),
            )
            assert same(vtensor, answer.vtensor, num_tokens)


def test_chunks_may_be_of_other_sizes_but_where_there_are_windows(
    peers: tuple[Peer, Peer],
) -> None:
    for name, fits in (("shapes", True), ("a window", False)):
        with open_manager(name) as sender, open_manager(name, chunk_bytes=8192) as receiver:
            vtensor = computed(sender, 50, 0)
            sent, received = together(
                lambda vtensor=vtensor: send_planes(
                    peers[0], IDENTITY, Computed(vtensor, list(range(50)), "")
                ),
                lambda receiver=receiver: receive_planes(peers[1], IDENTITY, receiver),
            )
            if fits:
                assert same(vtensor, received.vtensor, 50)
            else:
                assert isinstance(received, HandoverError)
                assert "with windows chunk_bytes" in str(received)
                assert str(received) in str(sent)
                assert receiver.stats().num_vtensors == 0


def test_rows_that_could_not_be_given_back_are_an_error(
    peers: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_manager("a window") as sender, open_manager("a window") as receiver:
        vtensor = computed(sender, 100, 0)
        monkeypatch.setattr(receiver, "forget", lambda *_: None)
        sent, received = together(
            lambda: send_planes(peers[0], IDENTITY, Computed(vtensor, list(range(100)), "")),
            lambda: receive_planes(peers[1], IDENTITY, receiver),
        )
        assert "could not be given back" in str(received)
        assert str(received) in str(sent)
        assert receiver.stats().num_vtensors == 0
