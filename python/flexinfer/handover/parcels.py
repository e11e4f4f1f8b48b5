"""Parcels over a channel: the KV of known tokens, with all that must agree before it is mapped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flexinfer.errors import HandoverError
from flexinfer.handover.channel import Channel, close_files
from flexinfer.vtensor import Parcel, VTensor, VTensorManager


@dataclass(frozen=True)
class Identity:
    """Of an engine: whose KV means the same."""

    model: str
    """A digest of the weights and of what computes with them."""
    tokenizer: str

    def check(self, header: dict[str, Any]) -> None:
        """Raises HandoverError for another model's or tokenizer's KV."""
        for name, own in (("model", self.model), ("tokenizer", self.tokenizer)):
            if header.get(name) != own:
                raise HandoverError(
                    f"the parcel's {name} is {header.get(name)!r}, where this process has {own!r}"
                )


def send_parcel(
    channel: Channel, identity: Identity, parcel: Parcel, tokens: Sequence[int], salt: str = ""
) -> None:
    """Send what is the KV of these tokens. The parcel stays open: close it afterwards."""
    if len(tokens) != parcel.num_tokens:
        raise HandoverError(f"{len(tokens)} tokens for a parcel of {parcel.num_tokens}")
    header = {
        "model": identity.model,
        "tokenizer": identity.tokenizer,
        "salt": salt,
        "tokens": [int(token) for token in tokens],
        "parcel": parcel.describe(),
    }
    channel.send(header, parcel.files)


def adopt_parcel(
    header: dict[str, Any], files: list[int], identity: Identity, manager: VTensorManager
) -> tuple[VTensor, list[int]]:
    """The vTensor of a message that :func:`send_parcel` sent, and its tokens. Closes the files.

    Raises HandoverError, with nothing mapped, for what is not this engine's KV.
    """
    try:
        identity.check(header)
        tokens, salt = header.get("tokens"), header.get("salt")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise HandoverError("a parcel's tokens are not a list of numbers")
        if not isinstance(salt, str) or not isinstance(header.get("parcel"), dict):
            raise HandoverError("a message holds no parcel")
        parcel = Parcel.from_files(header["parcel"], files)
        if len(tokens) != parcel.num_tokens:
            raise HandoverError(f"{len(tokens)} tokens for a parcel of {parcel.num_tokens}")
        return manager.adopt(parcel, salt), tokens
    finally:
        close_files(files)
