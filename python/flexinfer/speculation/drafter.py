"""Drafter: what proposes tokens; the interface, and the look-up of n-grams behind it. No torch.

Another way to propose is another class here or, where it needs a model, in engine/draft_model.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from flexinfer.scheduler.request import Request
from flexinfer.speculation.ngram import NgramIndex


@dataclass(frozen=True, slots=True)
class Outlook:
    """What could be proposed for one request."""

    num_tokens: int
    known: Sequence[int] = ()
    """The proposal itself, where it costs no work."""


class Drafter(Protocol):
    """Not thread-safe."""

    @property
    def caught_up(self) -> bool:
        """Whether the last `propose` did work for a first time too, such as reading a prompt: how
        long it took does not tell what proposals cost."""
        ...

    def outlook(self, request: Request, most: int) -> Outlook:
        """For at most `most` tokens."""
        ...

    def propose(
        self, requests: Sequence[Request], lengths: Sequence[int]
    ) -> Sequence[Sequence[int]]:
        """Proposals of these lengths, at least 1, at most those of `outlook`; or shorter ones."""
        ...

    def forget(self, ended: Iterable[Request]) -> None:
        """These requests have ended; ones never heard of are passed over."""
        ...


class NgramDrafter:
    """What followed the last tokens of a request where they stood before."""

    caught_up = False
    """Reading a prompt is cheap."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = shortest, longest
        self._indices: dict[Request, NgramIndex] = {}
        self._known: dict[Request, Sequence[int]] = {}

    def outlook(self, request: Request, most: int) -> Outlook:
        index = self._indices.get(request)
        if index is None:
            index = self._indices[request] = NgramIndex(*self._lengths)
        known = self._known[request] = index.propose(request.token_ids, most)
        return Outlook(len(known), known)

    def propose(
        self, requests: Sequence[Request], lengths: Sequence[int]
    ) -> Sequence[Sequence[int]]:
        return [self._known[r][:length] for r, length in zip(requests, lengths, strict=True)]

    def forget(self, ended: Iterable[Request]) -> None:
        for request in ended:
            self._indices.pop(request, None)
            self._known.pop(request, None)
