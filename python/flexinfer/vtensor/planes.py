"""Planes: the virtual ranges of a vTensor, and how much of each its later queries read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from flexinfer.vtensor.groups import KVGroup


@dataclass(frozen=True)
class Plane:
    """One virtual range of a vTensor, named by the tensor at its beginning."""

    layer: int
    which: Literal["k", "v"]
    token_bytes: int
    window: int | None
    """As in :class:`KVGroup`."""


def planes_of(groups: Iterable[KVGroup]) -> Iterator[Plane]:
    """In the order of the groups."""
    for group in groups:
        key_bytes = group.num_kv_heads * group.key_dim * group.element_bytes
        value_bytes = group.num_kv_heads * group.value_dim * group.element_bytes
        per_plane = group.layers_per_plane or len(group.layers)
        for layer in group.layers[::per_plane]:
            if per_plane > 1:
                token_bytes = (key_bytes + value_bytes) * per_plane
                yield Plane(layer, "k", token_bytes, group.window)
                continue
            yield Plane(layer, "k", key_bytes, group.window)
            if value_bytes:
                yield Plane(layer, "v", value_bytes, group.window)


def lasting_planes(groups: Iterable[KVGroup]) -> Iterator[Plane]:
    """Planes of which nothing is given back while a vTensor lives."""
    return (plane for plane in planes_of(groups) if plane.window is None)


def first_row_kept(
    window: int | None, num_tokens: int, chunk_token_bytes: int, chunk_bytes: int
) -> int:
    """The first row of chunks that queries from token `num_tokens` on read; chunk_token_bytes: of
    one token in one chunk of a row (:attr:`KVSpec.plane_token_bytes`)."""
    if window is None or num_tokens < window:
        return 0
    return (num_tokens + 1 - window) * chunk_token_bytes // chunk_bytes
