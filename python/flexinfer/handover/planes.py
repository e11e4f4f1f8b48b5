"""Hand-over between machines, with one copy: a vTensor is contiguous, so each of its planes is one
send of torch.distributed, from its own memory into the receiver's (plane_views.py).

    sender                                         receiver
    header: identity, layout, tokens, salt   -->   checked; a vTensor is made and extended
                                             <--   go, or why not
    plane 0, plane 1, ...                    -->   received where they stay
    those of the state, if one is kept       -->

One thread at a time at either end. A peer that dies or hangs is noticed as the group notices it, by
its timeout.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flexinfer.errors import HandoverError, OutOfMemoryError
from flexinfer.handover.parcels import Computed, Identity
from flexinfer.handover.plane_views import PlaneViews, create_room, create_state, manager_of
from flexinfer.vtensor import VTensorManager

if TYPE_CHECKING:
    import torch

MAX_HEADER_BYTES = 64 << 20
LAYOUT_DIFFERS = "the planes' heads, dtype, layers or windows differ, or with windows chunk_bytes"


@dataclass(frozen=True)
class Peer:
    """A process of a torch.distributed group."""

    group: Any
    """A ProcessGroup whose backend sends CPU tensors, such as gloo."""
    rank: int
    """Of the other process, in this group."""
    tag: int = 0
    """The first of those that are used: one for each plane."""

    def send(self, *tensors: torch.Tensor) -> None:
        """All under way at once; returns when they are sent."""
        self._exchange(self.group.send, tensors)

    def receive(self, *tensors: torch.Tensor) -> None:
        """What `send` of as many tensors sends."""
        self._exchange(self.group.recv, tensors)

    def _exchange(self, call: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> None:
        try:
            under_way = [call([each], self.rank, self.tag + i) for i, each in enumerate(tensors)]
            for each in under_way:
                each.wait()
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise HandoverError(f"the other process is gone: {reason}") from None

    def send_text(self, text: str) -> None:
        import torch

        body = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        self.send(torch.tensor([len(body)]))
        self.send(body)

    def receive_text(self) -> str:
        import torch

        size = torch.zeros(1, dtype=torch.int64)
        self.receive(size)
        if not 0 < int(size) <= MAX_HEADER_BYTES:
            raise HandoverError(f"the other process announces a message of {int(size)} bytes")
        body = torch.empty(int(size), dtype=torch.uint8)
        self.receive(body)
        return bytes(body.tolist()).decode()


def send_planes(peer: Peer, identity: Identity, computed: Computed) -> None:
    """The KV of these tokens, which are all that the vTensor has. Raises HandoverError where the
    receiver refuses it, with its reason, and for what cannot be sent so."""
    vtensor, tokens, state = computed.vtensor, computed.tokens, computed.state
    manager = manager_of(vtensor)
    check_planes(manager)
    if len(tokens) != vtensor.num_tokens:
        raise HandoverError(f"{len(tokens)} tokens for a vTensor of {vtensor.num_tokens}")
    if manager.spec.state.num_tokens != (0 if state is None else state.num_tokens):
        raise HandoverError("the state behind the tokens is missing, or not this model's")
    header = {
        "model": identity.model,
        "tokenizer": identity.tokenizer,
        "planes": plane_layout(manager),
        "tokens": [int(token) for token in tokens],
        "salt": computed.salt,
    }
    peer.send_text(json.dumps(header))
    answer = json.loads(peer.receive_text())
    if answer != "go":
        raise HandoverError(f"the receiver refuses the planes: {answer}")
    with PlaneViews(vtensor) as planes:
        peer.send(*planes)
    if state is not None:
        with PlaneViews(state, is_state=True) as planes:
            peer.send(*planes)


def receive_planes(peer: Peer, identity: Identity, manager: VTensorManager) -> Computed:
    """What was sent, in vTensors of its own. Raises HandoverError for another
    engine's KV, OutOfMemoryError where it is short: the sender is told both."""
    try:
        header = json.loads(peer.receive_text())
        check_planes(manager)
        identity.check(Identity(str(header.get("model")), str(header.get("tokenizer"))))
        if header["planes"] != plane_layout(manager):
            raise HandoverError(LAYOUT_DIFFERS)
        tokens, salt = [int(token) for token in header["tokens"]], str(header["salt"])
        computed = _create(manager, salt, tokens)
    except (HandoverError, OutOfMemoryError, ValueError, KeyError, TypeError) as error:
        peer.send_text(json.dumps(str(error)))
        raise error if isinstance(error, OutOfMemoryError) else HandoverError(str(error)) from None
    try:
        peer.send_text(json.dumps("go"))
        with PlaneViews(computed.vtensor) as planes:
            peer.receive(*planes)
        if computed.state is not None:
            with PlaneViews(computed.state, is_state=True) as planes:
                peer.receive(*planes)
    except BaseException:
        computed.release()
        raise
    return computed


def _create(manager: VTensorManager, salt: str, tokens: Sequence[int]) -> Computed:
    """To receive into."""
    vtensor = create_room(manager, salt, len(tokens))
    try:
        return Computed(vtensor, tokens, salt, create_state(manager, salt))
    except BaseException:
        vtensor.release()
        raise


def check_planes(manager: VTensorManager) -> None:
    """Raises HandoverError for KV that is not whole planes on the CPU."""
    device = manager.k(manager.spec.groups[0].layers[0]).device
    if device.type != "cpu":
        raise HandoverError(f"planes cannot be sent over a network: they are on {device}")


def plane_layout(manager: VTensorManager) -> str:
    """Chunks may be of other sizes there, but where a window gives rows of them back."""
    spec = manager.spec
    rows = [manager.chunk_bytes] if spec.windows else []
    groups = [repr(group) for group in (*spec.groups, *spec.states)]
    return repr([spec.num_planes, groups, *rows])
