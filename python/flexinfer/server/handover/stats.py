"""HandoverStats: what a server has handed over, and taken. For one event loop."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

FAILURES = ("unreachable", "slow", "lost", "refused", "unfit", "no room", "avoided")
"""Nobody answers at the socket; nothing came in time; the partner ended, or spoke nonsense; it
refused, as when it is full; its KV is not this engine's; it finds no memory here; it was not asked,
since it was slow just before."""


@dataclass
class HandoverStats:
    """Totals since the start."""

    parcels_sent: int = 0
    parcels_adopted: int = 0
    bytes_sent: int = 0
    bytes_adopted: int = 0
    """Of KV, in whole chunks."""
    chunks_copied: int = 0
    """Of what was sent: they lay beside others' KV."""
    tokens_adopted: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    """By reason, one of FAILURES; each time the prompt was prefilled where it is decoded."""
