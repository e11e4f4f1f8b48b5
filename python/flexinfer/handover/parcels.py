"""Parcels over a channel: the KV of known tokens, and where a model keeps one the recurrent state
behind them, with all that must agree before they are mapped."""

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
class Computed:
    """What stands behind known tokens, in this process."""

    vtensor: VTensor
    tokens: Sequence[int]
    salt: str
    """Only requests with the same one may find it."""
    state: VTensor | None = None
    """Of a model that keeps one."""

    def release(self) -> None:
        for vtensor in (self.vtensor, self.state):
            if vtensor is not None:
                vtensor.release()


@dataclass(frozen=True)
class Delivery:
    """A parcel, and what it is the KV of."""

    identity: Identity
    """Of the engine that computed it."""
    tokens: Sequence[int]
    salt: str
    """Only requests with the same one may find it."""
    parcel: Parcel
    state: Parcel | None = None
    """Behind all of these tokens, of a model that keeps one."""

    def __post_init__(self) -> None:
        if len(self.tokens) != self.parcel.num_tokens:
            raise HandoverError(
                f"{len(self.tokens)} tokens for a parcel of {self.parcel.num_tokens}"
            )

    @property
    def num_chunks(self) -> int:
        return sum(parcel.num_chunks for parcel in self._parcels)

    @property
    def num_copied(self) -> int:
        """Chunks that had to be copied."""
        return sum(parcel.num_copied for parcel in self._parcels)

    @property
    def _parcels(self) -> tuple[Parcel, ...]:
        return (self.parcel,) if self.state is None else (self.parcel, self.state)

    def send(self, channel: Channel) -> None:
        """To another process. The parcels stay open: `close` them afterwards."""
        header: dict[str, Any] = {
            "model": self.identity.model,
            "tokenizer": self.identity.tokenizer,
            "salt": self.salt,
            "tokens": [int(token) for token in self.tokens],
            "parcels": [
                {"num_files": len(parcel.files), **parcel.describe()} for parcel in self._parcels
            ],
        }
        channel.send(header, [file for parcel in self._parcels for file in parcel.files])

    @classmethod
    def from_message(cls, header: dict[str, Any], files: list[int]) -> Self:
        """What `send` sent, as a channel received it. Closes the files, whatever comes of it.
        Raises HandoverError for what is no delivery."""
        try:
            tokens, salt = header.get("tokens"), header.get("salt")
            if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
                raise HandoverError("a parcel's tokens are not a list of numbers")
            if not isinstance(salt, str):
                raise HandoverError("a message holds no parcel")
            sender = Identity(str(header.get("model")), str(header.get("tokenizer")))
            return cls(sender, tokens, salt, *_parcels_of(header.get("parcels"), files))
        finally:
            close_files(files)

    def adopt(self, identity: Identity, manager: VTensorManager) -> Computed:
        """As :meth:`VTensorManager.adopt`, for an engine of this identity. Raises HandoverError,
        with nothing mapped, for what is not its KV."""
        identity.check(self.identity)
        wanted = manager.spec.state.num_tokens
        if wanted != (0 if self.state is None else self.state.num_tokens):
            raise HandoverError("the parcel's recurrent state is not this model's")
        vtensor = manager.adopt(self.parcel, self.salt)
        try:
            state = None if self.state is None else manager.adopt(self.state, self.salt)
        except BaseException:
            vtensor.release()
            raise
        return Computed(vtensor, self.tokens, self.salt, state)

    def close(self) -> None:
        """Nobody adopts it any more here; what was sent stays."""
        for parcel in self._parcels:
            parcel.close()


def _parcels_of(described: Any, files: list[int]) -> list[Parcel]:
    """One or two. Raises HandoverError for what is none."""
    if not isinstance(described, list) or not 1 <= len(described) <= 2:
        raise HandoverError("a message holds no parcel")
    parcels: list[Parcel] = []
    for each in described:
        if not isinstance(each, dict) or type(each.get("num_files")) is not int:
            raise HandoverError("a message holds no parcel")
        own, files = files[: max(0, each["num_files"])], files[max(0, each["num_files"]) :]
        parcels.append(Parcel.from_files(each, own))
    return parcels
