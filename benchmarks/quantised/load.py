"""What both sides are asked for, and nothing that only one of them could import."""

from __future__ import annotations

import random

NUM_PROMPT = 512
"""Tokens of the prompt whose prefill is timed."""
NUM_NEW = 64
"""Tokens of the decode that is timed, after one token of prompt."""
NUM_BATCH = (32, 16, 32)
"""Requests at once, tokens of each prompt, new tokens of each."""
REPETITIONS = 3


def prompts_of(count: int, length: int) -> list[list[int]]:
    """Token ids; no two prompts begin alike."""
    rng = random.Random(f"{count} {length}")
    return [[rng.randrange(300, 30_000) for _ in range(length)] for _ in range(count)]
