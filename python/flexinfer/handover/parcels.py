"""Parcels over a channel: the KV of known tokens, with all that must agree before it is mapped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from flexinfer.errors import HandoverError
from flexinfer.handover.channel import Channel, close_files
from flexinfer.vtensor import Parcel, VTensor, VTensorManager


@dataclass(frozen=True)
class Identity:
    """Of an engine: whose KV means the same."""

    model: str
    """A digest of the weights and of what computes with them."""
    tokenizer: str

    def check(self, other: Identity) -> None:
        """Raises HandoverError for another model's or tokenizer's KV."""
        for name in ("model", "tokenizer"):
            theirs, own = getattr(other, name), getattr(self, name)
            if theirs != own:
                raise HandoverError(
                    f"the parcel's {name} is {theirs!r}, where this process has {own!r}"
                )


@dataclass(frozen=True)
class Delivery:
    """A parcel, and what it is the KV of."""

    identity: Identity
    """Of the engine that computed it."""
    tokens: Sequence[int]
    salt: str
    """Only requests with the same one may find it."""
    parcel: Parcel

    def __post_init__(self) -> None:
        if len(self.tokens) != self.parcel.num_tokens:
            raise HandoverError(
                f"{len(self.tokens)} tokens for a parcel of {self.parcel.num_tokens}"
            )

    def send(self, channel: Channel) -> None:
        """To another process. The parcel stays open: `close` it afterwards."""
        header = {
            "model": self.identity.model,
            "tokenizer": self.identity.tokenizer,
            "salt": self.salt,
            "tokens": [int(token) for token in self.tokens],
            "parcel": self.parcel.describe(),
        }
        channel.send(header, self.parcel.files)

    @classmethod
    def from_message(cls, header: dict[str, Any], files: list[int]) -> Self:
        """What `send` sent, as a channel received it. Closes the files, whatever comes of it.
        Raises HandoverError for what is no delivery."""
        try:
            tokens, salt = header.get("tokens"), header.get("salt")
            if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
                raise HandoverError("a parcel's tokens are not a list of numbers")
            if not isinstance(salt, str) or not isinstance(header.get("parcel"), dict):
                raise HandoverError("a message holds no parcel")
            sender = Identity(str(header.get("model")), str(header.get("tokenizer")))
            return cls(sender, tokens, salt, Parcel.from_files(header["parcel"], files))
        finally:
            close_files(files)

    def adopt(self, identity: Identity, manager: VTensorManager) -> VTensor:
        """As :meth:`VTensorManager.adopt`, for an engine of this identity. Raises HandoverError,
        with nothing mapped, for what is not its KV."""
        identity.check(self.identity)
        return manager.adopt(self.parcel, self.salt)

    def close(self) -> None:
        """Nobody adopts it any more here; what was sent stays."""
        self.parcel.close()
