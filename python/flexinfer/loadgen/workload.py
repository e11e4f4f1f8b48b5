"""Workload: the requests of a load: random, from a file of prompts, or from a trace."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexinfer.loadgen.request import LoadRequest
from flexinfer.loadgen.trace import BLOCK_TOKENS, TraceEntry, read_trace
from flexinfer.loadgen.vocabulary import Vocabulary


@dataclass(frozen=True)
class Workload:
    """Requests, and when a trace issues them; None: that is left to the request rate."""

    requests: list[LoadRequest]
    arrivals_s: list[float] | None = None


@dataclass(frozen=True)
class RandomLengths:
    """Lengths drawn evenly from mean * (1 - ratio) to mean * (1 + ratio)."""

    input_len: int
    output_len: int
    range_ratio: float = 0.0
    prefix_len: int = 0
    """Tokens that all prompts begin with, on top of `input_len`."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.range_ratio < 1.0:
            raise ValueError(f"--random-range-ratio must be in [0, 1), got {self.range_ratio}")
        for name, least in (("input_len", 1), ("output_len", 1), ("prefix_len", 0)):
            if getattr(self, name) < least:
                option = f"--random-{name.replace('_', '-')}"
                raise ValueError(f"{option} must be at least {least}, got {getattr(self, name)}")


def random_workload(
    num_prompts: int, lengths: RandomLengths, vocabulary: Vocabulary, seed: int
) -> Workload:
    """Prompts at random, all after one common prefix."""
    rng = random.Random(seed)
    prefix = vocabulary.draw(lengths.prefix_len, rng)
    requests = []
    for _ in range(num_prompts):
        num_input = _around(lengths.input_len, lengths.range_ratio, rng)
        num_output = _around(lengths.output_len, lengths.range_ratio, rng)
        pieces = [*prefix, *vocabulary.draw(num_input, rng)]
        requests.append(LoadRequest(vocabulary.prompt(pieces), len(pieces), num_output))
    return Workload(requests)


def custom_workload(file: Path, num_prompts: int, output_len: int, seed: int) -> Workload:
    """Prompts of a file of JSON lines, {"prompt": text} with an optional "output_tokens"; drawn
    anew from the start if there are too few. Raises ValueError or OSError."""
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{file}, line {number}: not JSON: {error}") from error
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
            raise ValueError(f'{file}, line {number}: wants {{"prompt": "text"}}')
        length = row.get("output_tokens", output_len)
        if type(length) is not int or length < 1:
            raise ValueError(
                f"{file}, line {number}: output_tokens must be a positive integer, got {length!r}"
            )
        rows.append(row)
    if not rows:
        raise ValueError(f"{file} has no prompts")
    random.Random(seed).shuffle(rows)
    chosen = (rows[idx % len(rows)] for idx in range(num_prompts))
    return Workload([_custom(row, output_len) for row in chosen])


def _custom(row: dict[str, Any], output_len: int) -> LoadRequest:
    num_words = len(row["prompt"].split())
    return LoadRequest(row["prompt"], num_words, row.get("output_tokens", output_len))


@dataclass(frozen=True)
class TraceScale:
    """How a trace is fitted to a small machine: factors of times and lengths, then bounds."""

    time: float = 1.0
    length: float = 1.0
    max_input_len: int | None = None
    max_output_len: int | None = None

    def __post_init__(self) -> None:
        if not (self.time >= 0 and self.length > 0):
            raise ValueError(f"scales must be positive, got {self}")

    def input_len(self, entry: TraceEntry) -> int:
        return _bounded(entry.num_prompt_tokens * self.length, self.max_input_len)

    def output_len(self, entry: TraceEntry) -> int:
        return _bounded(entry.num_output_tokens * self.length, self.max_output_len)


def trace_workload(
    file: Path, num_prompts: int | None, scale: TraceScale, vocabulary: Vocabulary, seed: int
) -> Workload:
    """Requests of a trace, at its times. Blocks with equal ids have equal text, so that prefixes
    are shared as they were. Raises ValueError or OSError."""
    entries = read_trace(file, num_prompts)
    rng = random.Random(seed)
    block_len = max(1, round(BLOCK_TOKENS * scale.length))
    requests = []
    for entry in entries:
        num_input = scale.input_len(entry)
        pieces = _blocks(entry.block_ids, block_len, num_input, vocabulary, seed)
        pieces += vocabulary.draw(num_input - len(pieces), rng)
        prompt = vocabulary.prompt(pieces)
        requests.append(LoadRequest(prompt, num_input, scale.output_len(entry)))
    times = [entry.time_s for entry in entries]
    if any(time_s is None for time_s in times):
        return Workload(requests)
    return Workload(requests, [float(time_s or 0.0) * scale.time for time_s in times])


def _blocks(
    ids: Sequence[int], block_len: int, num_tokens: int, vocabulary: Vocabulary, seed: int
) -> list[Any]:
    """The text of the blocks, as much as the prompt is long."""
    pieces: list[Any] = []
    for block_id in ids:
        if len(pieces) >= num_tokens:
            break
        pieces += vocabulary.draw(block_len, random.Random(f"{seed}/{block_id}"))
    return pieces[:num_tokens]


def _around(mean: int, ratio: float, rng: random.Random) -> int:
    return max(1, rng.randint(round(mean * (1 - ratio)), round(mean * (1 + ratio))))


def _bounded(length: float, limit: int | None) -> int:
    return max(1, min(round(length), limit or round(length)))
