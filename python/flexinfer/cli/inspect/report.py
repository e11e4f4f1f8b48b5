"""MemoryReport: what a memory map says: what shares which chunks, and why a prefix stays.

Made from what `GET /admin/memory` answers (docs/server.md), on which it depends alone. Chunks are
those of the first plane of each group of layers; its other planes have as many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flexinfer.cli.memory_map import MapRow

NO_MAP = "this is not a memory map of flexinfer serve"
MAX_NAMES = 3
"""Of prefixes that continue one; more are counted."""


Groups = tuple[tuple[int | None, ...], ...]
"""For each group of layers its chunks; None where a window has left a place."""


@dataclass(frozen=True)
class LayerGroup:
    """Layers that keep the same tokens."""

    num_layers: int
    window: int | None
    """Tokens that they keep; None: all."""

    @property
    def label(self) -> str:
        return "all tokens" if self.window is None else f"window {self.window:,}"


@dataclass(frozen=True)
class VTensorUse:
    """One slot of the arena."""

    label: str
    """The request's id, or the vTensor's, or the slot's if it is parked."""
    id: int
    slot: int
    state: str
    num_tokens: int
    num_cached_tokens: int
    num_cut_tokens: int
    """That were recorded beyond these, but without rows which a window reads."""
    cut_by_window: int | None
    chunks: tuple[int, ...]
    num_shared_chunks: int
    """Of `chunks`: those that another live vTensor or a recorded prefix has too."""
    groups: Groups
    """All of its groups, where there are several or a window has left something."""
    num_given_back: int
    """Rows that a window has left."""


@dataclass(frozen=True)
class PrefixUse:
    """One recorded piece of a prefix: a node of the radix tree."""

    label: str
    start_tokens: int
    """Where in the prompt it begins; a piece before it ends there."""
    num_tokens: int
    parent: int
    """Position of the piece that it continues; -1: none."""
    text: str
    """Its first words; "" if the server does not say."""
    tenant: str
    chunks: tuple[int, ...]
    groups: Groups
    num_freed_chunks: int
    """Chunks that only this record holds: evicting it frees them."""
    shared_by: tuple[str, ...]
    """Labels of the live vTensors that map chunks of it."""
    pinned_by: tuple[str, ...]
    kept_because: tuple[str, ...]
    """Why it, or some of its memory, cannot be freed now; empty: it can be evicted whole."""

    @property
    def end_tokens(self) -> int:
        return self.start_tokens + self.num_tokens


@dataclass(frozen=True)
class MemoryReport:
    """The memory map of one moment."""

    model: str
    chunk_bytes: int
    num_planes: int
    row_tokens: float
    """Tokens that one chunk of the first plane holds; 0 if the server does not say."""
    truncated: bool
    groups: tuple[LayerGroup, ...]
    """Empty if the server does not say."""
    stats: dict[str, Any]
    engine: dict[str, Any]
    vtensors: tuple[VTensorUse, ...]
    prefixes: tuple[PrefixUse, ...]
    replica: str = ""
    """Whose it is, among several; "": a server alone."""
    replicas: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, body: Any) -> MemoryReport:
        """Raises ValueError for what is not a memory map."""
        if not isinstance(body, Mapping):
            raise ValueError(f"{NO_MAP}: it is a {type(body).__name__}, not an object")
        if "vtensors" in body and "chunks" not in body:
            raise ValueError(
                "this was made by inspect --json, which leaves chunks out: save what "
                "GET /admin/memory answers"
            )
        try:
            return cls(
                model=str(body.get("model", "")),
                chunk_bytes=int(body["chunk_bytes"]),
                num_planes=int(body["num_planes"]),
                row_tokens=float(body.get("row_tokens", 0.0)),
                truncated=bool(body.get("truncated", False)),
                groups=tuple(
                    LayerGroup(int(group["num_layers"]), group["window"])
                    for group in body.get("groups", ())
                ),
                stats=dict(body["stats"]),
                engine=dict(body.get("engine", {})),
                vtensors=_vtensors(body),
                prefixes=_prefixes(body),
                replica=str(body.get("replica", "")),
                replicas=tuple(body.get("replicas", ())),
            )
        except KeyError as error:
            raise ValueError(f"{NO_MAP}: it lacks {error}") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{NO_MAP}: its values are of other types ({error})") from error

    def rows(self) -> list[MapRow]:
        """Everything that refers to chunks, in order: vTensors, then prefixes; each group of layers
        has a row of its own below the first."""
        return [row for row, _ in self._rows()]

    def first_chunks(self) -> list[int]:
        """For each of `rows`, how many chunks of its prompt lie before it."""
        return [first for _, first in self._rows()]

    def _rows(self) -> Iterator[tuple[MapRow, int]]:
        starts = [0] * len(self.vtensors) + [use.start_tokens for use in self.prefixes]
        uses: tuple[VTensorUse | PrefixUse, ...] = (*self.vtensors, *self.prefixes)
        for use, start in zip(uses, starts, strict=True):
            first = int(start // self.row_tokens) if self.row_tokens else 0
            chunks, *others = use.groups or (use.chunks,)
            yield MapRow(use.label, chunks, use.num_tokens), first
            for group, chunks in zip(self.groups[1:], others, strict=False):
                yield MapRow(f"{use.label}, {group.label}", chunks, use.num_tokens), first

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _vtensors(body: Mapping[str, Any]) -> tuple[VTensorUse, ...]:
    chunks = {chunk["id"]: chunk for chunk in body["chunks"]}
    return tuple(
        VTensorUse(
            label=_label(entry),
            id=entry["id"],
            slot=entry["slot"],
            state=entry["state"],
            num_tokens=entry["num_tokens"],
            num_cached_tokens=entry["num_cached_tokens"],
            num_cut_tokens=entry.get("num_cut_tokens", 0),
            cut_by_window=entry.get("cut_by_window"),
            chunks=tuple(entry["chunks"]),
            num_shared_chunks=sum(
                len(chunks[idx]["sharers"]) > 1 or chunks[idx]["recorded"]
                for idx in entry["chunks"]
                if idx in chunks
            ),
            groups=_groups(entry),
            num_given_back=entry.get("rows_given_back", 0),
        )
        for entry in body["vtensors"]
    )


def _prefixes(body: Mapping[str, Any]) -> tuple[PrefixUse, ...]:
    labels = {entry["id"]: _label(entry) for entry in body["vtensors"] if entry["id"]}
    chunks = {chunk["id"]: chunk for chunk in body["chunks"]}
    continued_by: dict[int, list[str]] = {}
    for number, entry in enumerate(body["prefixes"], start=1):
        continued_by.setdefault(entry.get("parent", -1), []).append(f"prefix {number}")
    return tuple(
        _prefix(f"prefix {idx + 1}", entry, chunks, labels, continued_by.get(idx, []))
        for idx, entry in enumerate(body["prefixes"])
    )


def _prefix(
    label: str,
    entry: Mapping[str, Any],
    chunks: Mapping[int, Mapping[str, Any]],
    labels: Mapping[int, str],
    continued_by: list[str],
) -> PrefixUse:
    own = [chunks[idx] for idx in entry["chunks"] if idx in chunks]
    users = Counter(labels.get(i, f"vTensor {i}") for chunk in own for i in chunk["sharers"])
    num_elsewhere = sum(chunk["refs"] - len(chunk["sharers"]) > 1 for chunk in own)
    pinned_by = tuple(entry["pinned_by"])
    reasons = []
    if pinned_by:
        reasons.append(f"pinned by {', '.join(pinned_by)}")
    if continued_by:
        many = f"{len(continued_by)} longer prefixes"
        names = many if len(continued_by) > MAX_NAMES else ", ".join(continued_by)
        reasons.append(f"{names} must go first")
    if users:
        used = ", ".join(f"{label} ({count})" for label, count in users.items())
        reasons.append(f"chunks in use by {used}")
    if num_elsewhere:
        chunks_text = "1 chunk" if num_elsewhere == 1 else f"{num_elsewhere} chunks"
        reasons.append(f"{chunks_text} also in parked slots or other prefixes")
    return PrefixUse(
        label=label,
        start_tokens=entry["start_tokens"],
        num_tokens=entry["num_tokens"],
        parent=entry.get("parent", -1),
        text=entry.get("text", ""),
        tenant=entry.get("tenant", ""),
        chunks=tuple(entry["chunks"]),
        groups=_groups(entry),
        num_freed_chunks=0 if pinned_by else sum(chunk["refs"] == 1 for chunk in own),
        shared_by=tuple(users),
        pinned_by=pinned_by,
        kept_because=tuple(reasons),
    )


def _groups(entry: Mapping[str, Any]) -> Groups:
    return tuple(tuple(row) for row in entry.get("groups", ()))


def _label(entry: Mapping[str, Any]) -> str:
    if entry.get("request_id"):
        return str(entry["request_id"])
    if entry.get("state_of"):
        return f"{entry['state_of']}, state"
    if entry["id"]:
        return f"vTensor {entry['id']}"
    return f"slot {entry['slot']} ({entry['state']})"
