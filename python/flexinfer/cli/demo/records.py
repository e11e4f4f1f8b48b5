"""What a run of the demo leaves behind: plain numbers, ready for tables, checks and JSON."""

from __future__ import annotations

from dataclasses import dataclass, field

from flexinfer.cli.memory_map import MapRow


@dataclass(frozen=True)
class Turn:
    """One answer in one conversation. Both are counted from 1."""

    conversation: int
    turn: int
    user: str
    expect: str | None
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    num_new_tokens: int
    """Prompt tokens that the turns before did not have."""
    num_reused_tokens: int
    num_computed_tokens: int
    """Prompt tokens that went through the model, as the engine counted them."""
    chunks_aliased: int
    chunks_copied: int
    num_preemptions: int
    time_to_first_token_s: float

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


@dataclass(frozen=True)
class Sample:
    """Physical bytes after one step of the engine."""

    time_s: float
    turn: int
    used_bytes: int
    """Distinct chunks that a running or a recorded conversation uses."""
    created_bytes: int
    """All chunks taken from the system, free ones too."""
    unshared_bytes: int
    """What the same conversations would need in chunks of their own."""


@dataclass
class Run:
    """All turns of all conversations, with or without the prefix cache."""

    prefix_caching: bool
    chunk_bytes: int
    bytes_per_token: int
    layers_per_plane: int
    num_rewritten: int = 0
    chunks_evicted: int = 0
    turns: list[Turn] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    map_rows: list[MapRow] = field(default_factory=list)
    num_planes: int = 1
    seconds: float = 0.0

    @property
    def num_conversations(self) -> int:
        return max(turn.conversation for turn in self.turns)

    @property
    def num_turns(self) -> int:
        return max(turn.turn for turn in self.turns)

    def of_turn(self, turn: int) -> list[Turn]:
        """One turn of all conversations, in their order."""
        chosen = [entry for entry in self.turns if entry.turn == turn]
        return sorted(chosen, key=lambda entry: entry.conversation)

    def peak(self, what: str) -> int:
        """Largest `what` of all samples."""
        return max(int(getattr(sample, what)) for sample in self.samples)

    def end(self, what: str) -> int:
        """`what` of the last sample."""
        return int(getattr(self.samples[-1], what))
