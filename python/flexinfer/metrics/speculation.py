"""SpeculationStats: what was proposed ahead, and what of it was accepted. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class SpeculationStats:
    """Totals since the start; names are those of vLLM's metrics."""

    num_speculative_tokens: int
    """The longest proposal."""
    num_drafts: int = 0
    """Proposals that were verified."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    """How often the first, second, ... token of a proposal was accepted."""

    def __post_init__(self) -> None:
        if not self.accepted_per_position:
            self.accepted_per_position = [0] * self.num_speculative_tokens

    def note(self, num_proposed: int, num_accepted: int) -> None:
        """A proposal was verified."""
        self.num_drafts += 1
        self.num_draft_tokens += num_proposed
        self.num_accepted_tokens += num_accepted
        for place in range(num_accepted):
            self.accepted_per_position[place] += 1

    def copy(self) -> SpeculationStats:
        same = SpeculationStats(**asdict(self))
        same.accepted_per_position = list(self.accepted_per_position)
        return same

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
