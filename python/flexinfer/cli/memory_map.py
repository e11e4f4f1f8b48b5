"""The memory map: which chunks stand in which conversations, one character a chunk.

1  AAAAAAAAAAaaaaaa        A: one chunk in several conversations
2  AAAAAAAAAAbbbb          a, b: chunks of one conversation alone
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

_SHARED = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_OWN = "abcdefghijklmnopqrstuvwxyz"
GIVEN_BACK = "·"
"""A place whose memory a window has left."""
_COLOURS = ("green", "cyan", "magenta", "yellow", "blue", "red")


@dataclass(frozen=True)
class MapRow:
    """The chunks behind one conversation, in the order of its tokens."""

    label: str
    chunks: tuple[int | None, ...]
    """None: given back, because a window has left it."""
    num_tokens: int = 0


@dataclass(frozen=True)
class Group:
    """Chunks that stand in the same rows."""

    symbol: str
    style: str
    labels: tuple[str, ...]
    chunks: tuple[int, ...]

    @property
    def is_shared(self) -> bool:
        return len(self.labels) > 1


def live_rows(snapshot: Any, labels: dict[int, str]) -> list[MapRow]:
    """Rows of the live vTensors that `labels` names, in its order; plane 0 stands for all."""
    from flexinfer.vtensor import kept_chunks

    infos = {info.id: info for info in snapshot.vtensors if info.state == "live"}
    return [
        MapRow(
            label,
            tuple(kept_chunks(infos[key].table[:: snapshot.num_planes])),
            infos[key].num_tokens,
        )
        for key, label in labels.items()
        if key in infos
    ]


def recorded_rows(snapshot: Any) -> list[MapRow]:
    """One row for each recorded piece of a conversation, in the order of their tokens."""
    from flexinfer.vtensor import kept_chunks

    pieces = sorted(snapshot.prefixes, key=lambda piece: (piece.start_tokens, piece.chunks))
    return [
        MapRow(
            f"tokens {piece.start_tokens}-{piece.start_tokens + piece.num_tokens - 1}",
            tuple(kept_chunks(piece.chunks[:: snapshot.num_planes])),
            piece.num_tokens,
        )
        for piece in pieces
    ]


def group_chunks(rows: Sequence[MapRow]) -> list[Group]:
    """Chunks by the set of rows that they stand in; in order of their first appearance."""
    by_labels: dict[tuple[str, ...], list[int]] = {}
    for chunk, labels in _holders(rows).items():
        by_labels.setdefault(tuple(labels), []).append(chunk)
    groups: list[Group] = []
    for holders, chunks in by_labels.items():
        shared = len(holders) > 1
        idx = sum(group.is_shared == shared for group in groups)
        letters = _SHARED if shared else _OWN
        style = f"{'bold ' if shared else ''}{_COLOURS[idx % len(_COLOURS)]}"
        groups.append(Group(letters[idx % len(letters)], style, holders, tuple(sorted(chunks))))
    return groups


def _holders(rows: Sequence[MapRow]) -> dict[int, list[str]]:
    """Chunk -> labels of the rows that it appears in."""
    holders: dict[int, list[str]] = {}
    for row in rows:
        for chunk in dict.fromkeys(chunk for chunk in row.chunks if chunk is not None):
            holders.setdefault(chunk, []).append(row.label)
    return holders


def render_map(rows: Sequence[MapRow], width: int = 80) -> RenderableType:
    """The rows as letters, wrapped at `width`, and what each letter means."""
    from rich.console import Group as Lines
    from rich.text import Text

    groups = group_chunks(rows)
    group_of = {chunk: group for group in groups for chunk in group.chunks}
    indent = max((len(row.label) for row in rows), default=0) + 2
    lines = []
    for row in rows:
        cells = Text()
        for chunk in row.chunks:
            if chunk is None:
                cells.append(GIVEN_BACK, "dim")
                continue
            cells.append(group_of[chunk].symbol, group_of[chunk].style)
        lines.extend(_wrapped(row.label, cells, indent, max(width - indent, 8)))
    lines.append(Text())
    if any(None in row.chunks for row in rows):
        lines.append(Text(f"{GIVEN_BACK}  given back: a window has left it"))
    lines.extend(_legend(group) for group in groups)
    return Lines(*lines)


def _wrapped(label: str, cells: Any, indent: int, width: int) -> list[Any]:
    from rich.text import Text

    starts = range(0, max(len(cells), 1), width)
    return [
        Text((label if start == 0 else "").ljust(indent)) + cells[start : start + width]
        for start in starts
    ]


def _legend(group: Group) -> Any:
    from rich.text import Text

    count = f"{len(group.chunks)} chunk{'s' if len(group.chunks) > 1 else ''}"
    where = f"in {_together(group.labels)}" if group.is_shared else f"only in {group.labels[0]}"
    numbers = ", ".join(f"{low}-{high}" if low < high else f"{low}" for low, high in runs(group))
    return Text.assemble(
        (f"{group.symbol}  ", group.style), f"{count} {where}", (f"  (chunk {numbers})", "dim")
    )


def _together(labels: Sequence[str]) -> str:
    """("conversation 1", "conversation 2") -> "conversations 1, 2"."""
    parts = [label.rpartition(" ") for label in labels]
    if len({head for head, _, _ in parts}) > 1:
        return ", ".join(labels)
    head = parts[0][0].removesuffix("s")
    plural = f"{head}es" if head.endswith("x") else f"{head}s"
    return f"{plural} {', '.join(tail for _, _, tail in parts)}"


def runs(group: Group) -> list[tuple[int, int]]:
    """Chunk ids as runs of consecutive ones."""
    found: list[tuple[int, int]] = []
    for chunk in group.chunks:
        if found and found[-1][1] + 1 == chunk:
            found[-1] = (found[-1][0], chunk)
        else:
            found.append((chunk, chunk))
    return found
