"""Arrival: a request of a trace, with a prompt made up so that equal blocks are equal tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from flexinfer.loadgen.trace import BLOCK_TOKENS, TraceEntry
from flexinfer.loadgen.workload import TraceScale


@dataclass(frozen=True, slots=True)
class Arrival:
    time_s: float
    prompt_token_ids: list[int]
    num_output_tokens: int


def arrivals_of(
    entries: Sequence[TraceEntry], scale: TraceScale, max_model_len: int
) -> Iterator[Arrival]:
    """In order, one at a time, as prompts are long. Raises ValueError for a trace without times.

    Block i of the trace is the tokens from i times a block's length on; what no block covers is
    nobody else's. A request longer than `max_model_len` loses the end of its prompt.
    """
    block_len = max(1, round(BLOCK_TOKENS * scale.length))
    highest = max((max(entry.block_ids, default=0) for entry in entries), default=0)
    fresh = count((highest + 1) * block_len)
    for entry in entries:
        if entry.time_s is None:
            raise ValueError("the trace has lengths only; a simulation needs the times too")
        num_output = min(scale.output_len(entry), max_model_len - 1)
        num_prompt = min(scale.input_len(entry), max_model_len - num_output)
        tokens: list[int] = []
        for block in entry.block_ids[: -(-num_prompt // block_len)]:
            tokens.extend(range(block * block_len, (block + 1) * block_len))
        del tokens[num_prompt:]
        tokens.extend(next(fresh) % 2**31 for _ in range(num_prompt - len(tokens)))
        yield Arrival(entry.time_s * scale.time, tokens, num_output)
