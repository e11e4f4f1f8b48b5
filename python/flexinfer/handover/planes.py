"""Hand-over between machines, with one copy: a vTensor is contiguous, so each of its planes is one
send of torch.distributed, from its own memory into the receiver's (plane_views.py).

    sender                                         receiver
    header: identity, layout, tokens, salt   -->   checked; a vTensor is made and extended
                                             <--   go, or why not
    plane 0, plane 1, ...                    -->   received where they stay

One thread at a time at either end. A peer that dies or hangs is noticed as the group notices it, by
its timeout.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flexinfer.errors import HandoverError, OutOfMemoryError
from flexinfer.handover.parcels import Identity
from flexinfer.handover.plane_views import PlaneViews, create_room, manager_of
from flexinfer.vtensor import VTensor, VTensorManager

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


def send_planes(
    peer: Peer, identity: Identity, vtensor: VTensor, tokens: Sequence[int], salt: str = ""
) -> None:
    """The KV of these tokens, which are all that the vTensor has. Raises HandoverError where the
    receiver refuses it, with its reason, and for what cannot be sent so."""
    manager = manager_of(vtensor)
    check_planes(manager)
    if len(tokens) != vtensor.num_tokens:
        raise HandoverError(f"{len(tokens)} tokens for a vTensor of {vtensor.num_tokens}")
    header = {
        "model": identity.model,
        "tokenizer": identity.tokenizer,
        "planes": plane_layout(manager),
        "tokens": [int(token) for token in tokens],
        "salt": salt,
    }
    peer.send_text(json.dumps(header))
    answer = json.loads(peer.receive_text())
    if answer != "go":
        raise HandoverError(f"the receiver refuses the planes: {answer}")
    with PlaneViews(vtensor) as planes:
        peer.send(*planes)


def receive_planes(
    peer: Peer, identity: Identity, manager: VTensorManager
) -> tuple[VTensor, list[int], str]:
    """A vTensor of what was sent, its tokens and its salt. Raises HandoverError for another
    engine's KV, OutOfMemoryError where it is short: the sender is told both."""
    try:
        header = json.loads(peer.receive_text())
        check_planes(manager)
        identity.check(Identity(str(header.get("model")), str(header.get("tokenizer"))))
        if header["planes"] != plane_layout(manager):
            raise HandoverError(LAYOUT_DIFFERS)
        tokens, salt = [int(token) for token in header["tokens"]], str(header["salt"])
        vtensor = create_room(manager, salt, len(tokens))
    except (HandoverError, OutOfMemoryError, ValueError, KeyError, TypeError) as error:
        peer.send_text(json.dumps(str(error)))
        raise error if isinstance(error, OutOfMemoryError) else HandoverError(str(error)) from None
    try:
        peer.send_text(json.dumps("go"))
        with PlaneViews(vtensor) as planes:
            peer.receive(*planes)
    except BaseException:
        vtensor.release()
        raise
    return vtensor, tokens, salt


def check_planes(manager: VTensorManager) -> None:
    """Raises HandoverError for KV that is not whole planes on the CPU."""
    spec = manager.spec
    device = manager.k(spec.groups[0].layers[0]).device
    for is_given, what in (
        (device.type != "cpu", f"they are on {device}"),
        (bool(spec.states), "recurrent states stay behind"),
    ):
        if is_given:
            raise HandoverError(f"planes cannot be sent over a network: {what}")


def plane_layout(manager: VTensorManager) -> str:
    """Chunks may be of other sizes there, but where a window gives rows of them back."""
    spec = manager.spec
    rows = [manager.chunk_bytes] if spec.windows else []
    return repr([spec.num_planes, [repr(group) for group in spec.groups], *rows])
