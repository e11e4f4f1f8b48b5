"""KV that is sent plane by plane over torch.distributed, between two ranks in two threads."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer.errors import HandoverError, OutOfMemoryError
from flexinfer.handover.parcels import Computed, Identity
from flexinfer.handover.planes import Peer, receive_planes, send_planes
from flexinfer.vtensor import KVSpec, VTensor, VTensorManager
from helpers.gloo_pair import together

IDENTITY = Identity("model", "tokenizer")
TOKENS = list(range(21))


def spec_of(layers_per_plane: int) -> KVSpec:
    return KVSpec(
        num_layers=4, num_kv_heads=2, head_dim=16, max_seq_len=64, layers_per_plane=layers_per_plane
    )


def open_manager(spec: KVSpec, **options: Any) -> VTensorManager:
    given = {"max_requests": 2, "memory_budget": 1 << 20, "chunk_bytes": 4096, **options}
    return VTensorManager(spec, **given)


def filled(manager: VTensorManager) -> VTensor:
    vtensor = manager.create()
    vtensor.extend(len(TOKENS))
    generator = torch.Generator().manual_seed(0)
    for layer in range(4):
        for view in (vtensor.k(layer), vtensor.v(layer)):
            view.copy_(torch.rand(view.shape, generator=generator))
    return vtensor


def same(first: VTensor, second: VTensor) -> bool:
    return all(
        torch.equal(first.k(i), second.k(i)) and torch.equal(first.v(i), second.v(i))
        for i in range(4)
    )


@pytest.mark.parametrize("layers_per_plane", [1, 2, 4])
def test_all_planes_arrive_in_a_send_each(
    layers_per_plane: int, peers: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(layers_per_plane)
    sent: list[int] = []
    send = Peer.send

    def count(peer: Peer, *tensors: torch.Tensor) -> None:
        sent.extend(tensor.numel() for tensor in tensors)
        send(peer, *tensors)

    monkeypatch.setattr(Peer, "send", count)
    # Chunks may differ: what is sent are planes.
    with open_manager(spec) as sender, open_manager(spec, chunk_bytes=8192) as receiver:
        vtensor = filled(sender)
        _, answer = together(
            lambda: send_planes(peers[0], IDENTITY, Computed(vtensor, TOKENS, "salt")),
            lambda: receive_planes(peers[1], IDENTITY, receiver),
        )
        received, tokens, salt = answer.vtensor, answer.tokens, answer.salt
        assert (tokens, salt) == (TOKENS, "salt")
        assert same(vtensor, received)
        assert sent.count(len(TOKENS) * spec.plane_token_bytes) == spec.num_planes
        received.record_prefix(tokens)
        assert receiver.match_prefix(TOKENS, "salt") == len(TOKENS)
        receiver.check_integrity()


@pytest.mark.parametrize("wrong", ["model", "layout", "room"])
def test_what_does_not_fit_is_refused_at_both_ends_before_a_plane_is_sent(
    wrong: str, peers: tuple[Peer, Peer]
) -> None:
    spec = spec_of(4)
    theirs = spec_of(2) if wrong == "layout" else spec
    identity = Identity("another", "tokenizer") if wrong == "model" else IDENTITY
    budget = 4096 if wrong == "room" else 1 << 20
    with open_manager(spec) as sender, open_manager(theirs, memory_budget=budget) as receiver:
        vtensor = filled(sender)
        sent, received = together(
            lambda: send_planes(peers[0], IDENTITY, Computed(vtensor, TOKENS, "")),
            lambda: receive_planes(peers[1], identity, receiver),
        )
        assert isinstance(received, OutOfMemoryError if wrong == "room" else HandoverError)
        assert isinstance(sent, HandoverError)
        assert str(received) in str(sent)
        assert receiver.stats().num_vtensors == 0


def test_tokens_must_be_those_that_the_vtensor_has(peers: tuple[Peer, Peer]) -> None:
    with open_manager(spec_of(4)) as manager:
        vtensor = filled(manager)
        with pytest.raises(HandoverError, match="3 tokens for a vTensor of 21"):
            send_planes(peers[0], IDENTITY, Computed(vtensor, TOKENS[:3], ""))
