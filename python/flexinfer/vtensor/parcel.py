"""Parcel: the KV of a vTensor on its way to another process, as files of memory and places in them.

Nothing is copied: who adopts a parcel maps the same memory. The files keep it alive meanwhile, and
whoever dies gives up what it held. Not thread-safe.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Self

from flexinfer import _vtensor
from flexinfer.errors import HandoverError
from flexinfer.vtensor.spec import KVSpec


def layout_of(spec: KVSpec, chunk_bytes: int) -> str:
    """A digest of all that two managers must share to read each other's chunks."""
    groups = [repr(group) for group in (*spec.groups, *spec.states)]
    return hashlib.sha256(repr([groups, chunk_bytes]).encode()).hexdigest()[:32]


class Parcel:
    """Made by :meth:`VTensorManager.export`; :meth:`VTensorManager.adopt` uses it up.

    Attributes:
        layout: which managers it fits.
        num_tokens: tokens whose KV it holds.
        num_chunks: chunks in it.
        num_copied: those that had to be copied for it: they lay in memory with others' KV.
    """

    def __init__(self, core: _vtensor.Parcel, layout: str) -> None:
        self._core: _vtensor.Parcel | None = core
        self.layout = layout
        self.num_tokens = core.num_tokens
        self.num_chunks = len(core.places) // 2
        self.num_copied = core.num_copied

    @property
    def files(self) -> list[int]:
        """File descriptors to send. They are open until the parcel is used up or collected."""
        return self._open().files

    def describe(self) -> dict[str, Any]:
        """What must travel beside the files, as plain values for JSON."""
        core = self._open()
        return {
            "layout": self.layout,
            "num_tokens": core.num_tokens,
            "continues": core.continues,
            "places": [run for pair in _runs(core.places) for run in pair],
            "is_there": _lengths(core.is_there),
        }

    @classmethod
    def from_files(cls, description: Mapping[str, Any], files: Sequence[int]) -> Self:
        """What another process has described and sent; the descriptors stay the caller's.

        Raises HandoverError for a description that cannot be one.
        """
        try:
            places = [value for run in _unpacked(description["places"]) for value in run]
            core = _vtensor.Parcel(
                list(files),
                places,
                _flags(description["is_there"]),
                int(description["num_tokens"]),
                bool(description["continues"]),
            )
            return cls(core, str(description["layout"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise HandoverError(f"a parcel is badly described: {error}") from None

    def close(self) -> None:
        """Give up what is on its way: nobody can adopt it any more."""
        if self._core is not None:
            self._core.close()
        self._core = None

    def _open(self) -> _vtensor.Parcel:
        if self._core is None:
            raise HandoverError("the parcel has been adopted already, or closed")
        return self._core


MAX_CHUNKS = 1 << 22
"""In a parcel that others describe: what numbers in it may make this process allocate."""


def _runs(places: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """(file, first offset, step, count) of places [file, offset, file, offset, ...]."""
    pairs = list(zip(places[::2], places[1::2], strict=True))
    start = 0
    while start < len(pairs):
        file, offset = pairs[start]
        step = 0
        end = start + 1
        if end < len(pairs) and pairs[end][0] == file:
            step = pairs[end][1] - offset
            while end < len(pairs) and pairs[end] == (file, offset + (end - start) * step):
                end += 1
        yield file, offset, step, end - start
        start = end


def _unpacked(runs: Sequence[int]) -> Iterator[tuple[int, int]]:
    total = 0
    for i in range(0, len(runs), 4):
        file, offset, step, count = runs[i : i + 4]
        total += count
        if count < 1 or total > MAX_CHUNKS:
            raise ValueError(f"not 1 to {MAX_CHUNKS} chunks")
        for k in range(count):
            yield file, offset + k * step


def _lengths(flags: Sequence[bool]) -> list[int]:
    """Lengths of the runs of equal flags; the first one's is that of True, or 0."""
    runs = [(flag, sum(1 for _ in run)) for flag, run in groupby(flags)]
    return [length for _, length in runs] if runs and runs[0][0] else [0, *(n for _, n in runs)]


def _flags(lengths: Sequence[int]) -> list[bool]:
    if sum(lengths) > MAX_CHUNKS or min(lengths, default=0) < 0:
        raise ValueError(f"not 0 to {MAX_CHUNKS} entries")
    return [i % 2 == 0 for i, length in enumerate(lengths) for _ in range(length)]
