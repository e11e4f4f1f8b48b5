"""StepPlan and StepResult: what an executor is told of a step, and what it answers. No torch.

Plain, immutable values that can be pickled: what computes a step, in this process or in
another, needs nothing else. A plan says where each token stands, and names sequences by their
sampling ids; all that sampling needs beyond that the executor keeps (sampling/sequences.py), from
the plan that first has a sequence in `new_sequences` until it is told to forget it.

    segment     0    1    2         3              4
    tokens    | d0 | d1 | d2 | prompt chunk |  prompt chunk  |   one-token segments first
    row       0    1    2    3              10               24
    samples     ^    ^    ^                                ^     sampled_rows: 0 1 2 23
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flexinfer.sampling.logprobs import RowLogprobs
    from flexinfer.sampling.sequences import SequenceSetup

TokenRange = tuple[int, int, int, tuple[int, ...]]
"""(slot, start, end, segments): tokens whose KV these segments hold in the same chunks."""


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Prompt positions [start, end) whose logits tell the log probabilities of the tokens after
    them; they are the rows of the batch from `row` on."""

    sampling_id: int
    row: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A flat batch. Segment i is tokens [starts[i], ends[i]) of the sequence in slots[i]."""

    token_ids: bytes
    """[num_tokens] int32, of all segments one after the other."""
    slots: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    num_decodes: int
    """Segments with one token, which come first; the others have more."""
    sampled_rows: tuple[int, ...] = ()
    """Rows whose logits give a new token; forks of one prompt sample from the same row."""
    sampling_ids: tuple[int, ...] = ()
    """The sequence that each of these tokens is for. One that stands here several times in a row
    has tokens in this plan that are only proposed: each row but its first stands behind one, and
    gives a token only if the row before it gives that one."""
    sampled_lengths: tuple[int, ...] = ()
    """Tokens of that sequence before the new one."""
    scored: tuple[ScoredRows, ...] = ()
    new_sequences: tuple[SequenceSetup, ...] = ()
    """Those that no earlier plan has named."""
    fed: tuple[tuple[int, int], ...] = ()
    """(row, i): the token of this row is the i-th that the plan before this one samples, not known
    yet; `token_ids` has 0 in its place."""
    states: tuple[tuple[int, int], ...] = ()
    """(slot read, slot written) of each segment's recurrent state, where the model keeps one; -1:
    there is none before its first token."""
    adapters: tuple[int, ...] = ()
    """The LoRA adapter of each segment, 0: none; empty: no segment has one."""
    shared: tuple[TokenRange, ...] = ()
    """What the segments share of the KV before their new tokens; see `AttentionMetadata.shared`."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The new token of one sequence."""

    sampling_id: int
    token_id: int
    logprobs: RowLogprobs | None = None
    prompt_logprobs: list[RowLogprobs] | None = None
    """Of prompt tokens 1, 2, ..., with the first token of a sequence that asked for them."""


@dataclass(frozen=True, slots=True)
class SequenceFailure:
    """A sequence that cannot get a token; the others of its step are not concerned."""

    sampling_id: int
    message: str


@dataclass(frozen=True, slots=True)
class StepResult:
    """The tokens of a step, in the order of its `sampling_ids`, and what failed instead. Without
    those drawn behind a proposed token that was not, and without failures behind a token."""

    tokens: list[SampledToken]
    failures: list[SequenceFailure] = field(default_factory=list)
