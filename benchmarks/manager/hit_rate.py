"""Prefix hit rates with released slots kept mapped (parked) and without; see README.md beside this.

python benchmarks/manager/hit_rate.py [--trace FILE ...] [--limit 1500] [--json FILE]

The traces are public (Azure's, Mooncake's) and not part of this repository.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

from provenance import write_report

from flexinfer.loadgen.trace import TraceEntry, read_trace
from flexinfer.vtensor import KVSpec, SimConfig, VTensorManager

CHUNK_TOKENS = 16
SCALE = 32
"""Tokens of a trace per token here: one of Mooncake's blocks of 512 is one chunk."""
NUM_USERS = 100
"""Azure's traces do not say which requests belong together: their rows are dealt to that many
users at random, and a prompt is the first tokens of its user's text."""
SPEC = KVSpec(8, 32, 64, "float32", 4096)
CHUNK_BYTES = CHUNK_TOKENS * SPEC.bytes_per_token

Prompt = Any
"""int32 token ids."""


@dataclass(frozen=True)
class Program:
    """Prompts in order, and the memory that they meet."""

    name: str
    prompts: list[Prompt]
    budget_chunks: int
    in_flight: int = 1
    num_slots: int = 64
    prefix_cache_fraction: float = 1.0

    def hit_rate(self, park: bool) -> float:
        """Tokens found recorded per token asked for."""
        hits = asked = 0
        with VTensorManager(
            SPEC,
            "sim",
            max_requests=self.num_slots,
            memory_budget=self.budget_chunks * CHUNK_BYTES,
            chunk_bytes=CHUNK_BYTES,
            park=park,
            prefix_cache_fraction=self.prefix_cache_fraction,
            sim=SimConfig(granularity=CHUNK_BYTES),
        ) as manager:
            running: deque[Any] = deque()
            for prompt in self.prompts:
                vtensor = manager.create(prompt, max_cached_tokens=len(prompt) - 1)
                asked += len(prompt)
                hits += vtensor.num_cached_tokens
                while not vtensor.try_extend(len(prompt)):
                    running.popleft().release()
                vtensor.record_prefix(prompt)
                running.append(vtensor)
                while len(running) > self.in_flight - 1:
                    running.popleft().release()
        return hits / asked


def main(argv: Sequence[str] | None = None) -> None:
    """Play everything twice, print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trace", type=Path, action="append", default=[], help="may be repeated")
    parser.add_argument("--limit", type=int, default=1500, help="requests of each trace")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    arguments = parser.parse_args(argv)
    load_before = os.getloadavg()
    programs = [*_bursts(), *_conversations()]
    for file in arguments.trace:
        programs += _trace_programs(file, arguments.limit)
    rows = []
    print("| program | budget, chunks | parked | not parked |\n|---|---|---|---|")
    for program in programs:
        parked, plain = program.hit_rate(park=True), program.hit_rate(park=False)
        rows.append(
            {
                "program": program.name,
                "budget_chunks": program.budget_chunks,
                "num_requests": len(program.prompts),
                "hit_rate_parked": round(parked, 4),
                "hit_rate_not_parked": round(plain, 4),
            }
        )
        print(f"| {program.name} | {program.budget_chunks:,} | {parked:.4f} | {plain:.4f} |")
    write_report(arguments.json, "manager_hit_rate", {"rows": rows}, load_before=load_before)


def _text(first: int, num_tokens: int) -> Prompt:
    return np.arange(first, first + num_tokens, dtype=np.int32)


def _bursts() -> Iterator[Program]:
    """Eight documents at once, which nobody asks for again, then conversations in turn."""
    documents = [_text(100_000 * (i + 1), 128) for i in range(8)]
    for num_users in (10, 20, 30):
        turns = [
            np.append(_text(1_000 * (user + 1), 40), turn).astype(np.int32)
            for turn in range(12)
            for user in range(num_users)
        ]
        yield Program(
            f"8 documents, then {num_users} conversations in turn",
            [*documents, *turns],
            budget_chunks=100,
            num_slots=16,
        )


def _conversations() -> Iterator[Program]:
    """Documents, then conversations: in turn, by chance, and some far more often than others."""
    rng = random.Random(0)
    documents = [_text(100_000 * (i + 1), rng.randrange(100, 400)) for i in range(64)]
    orders = {
        "in turn": [i % 60 for i in range(1500)],
        "by chance": [rng.randrange(60) for _ in range(1500)],
        "by a power law": [min(int(rng.paretovariate(0.7)) - 1, 59) for _ in range(1500)],
    }
    for order, users in orders.items():
        turns = [_text(1_000 * (user + 1), 121) for user in users]
        for num_documents in (0, 20, 64):
            yield Program(
                f"{num_documents} documents, then 60 conversations {order}",
                [*documents[:num_documents], *turns],
                budget_chunks=4_800,
                prefix_cache_fraction=0.125,
            )


def _trace_programs(file: Path, limit: int) -> Iterator[Program]:
    entries = read_trace(file, limit)
    prompts = _block_prompts(entries) if entries[0].block_ids else _user_prompts(entries)
    longest = max(len(prompt) for prompt in prompts)
    distinct = len({int(t) // CHUNK_TOKENS for prompt in prompts for t in prompt[::CHUNK_TOKENS]})
    for in_flight in (1, 16):
        for part in (16, 8, 4, 2):  # of what would hold everything
            budget = max(distinct // part, 2 * longest // CHUNK_TOKENS)
            name = f"{file.name.partition('.')[0]}, {in_flight} in flight, budget for 1/{part}"
            yield Program(name, prompts, budget, in_flight)


def _block_prompts(entries: list[TraceEntry]) -> list[Prompt]:
    return [
        np.concatenate([_text(block * CHUNK_TOKENS, CHUNK_TOKENS) for block in entry.block_ids])[
            : SPEC.max_seq_len
        ]
        for entry in entries
    ]


def _user_prompts(entries: list[TraceEntry]) -> list[Prompt]:
    rng = random.Random(0)
    return [
        _text(10_000 * rng.randrange(NUM_USERS), max(2, entry.num_prompt_tokens // SCALE))
        for entry in entries
    ]


if __name__ == "__main__":
    main()
