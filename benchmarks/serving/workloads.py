"""The workloads, as token ids: same prompts for every engine, end of text ignored. Greedy:

mixed      32 requests, prompts of 64..512 tokens, 64 new tokens each
prefix     32 requests, 1,024 shared tokens + 64 own, 32 new tokens each
multiturn  8 conversations x 6 turns; a turn appends 64 user tokens and generates 64;
           all conversations submit turn t together, then turn t + 1

At temperature 1, for engines that take it:

sampled    as mixed
n8         4 requests, prompts of 64..512 tokens, 8 samples of 64 new tokens each

Lengths depend on the seed alone, contents on the repetition as well, so that nothing computed in
one repetition is a cache hit in the next.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

Prompts = list[list[int]]
Generate = Callable[..., Prompts]
"""(prompts, number of new tokens) -> new tokens of each prompt; with `temperature` and `n`, of each
sample."""

WORKLOADS = ("mixed", "prefix", "multiturn")
SAMPLED = ("sampled", "n8")
FIRST_TOKEN = 4
VOCAB_SIZE = 8192


@dataclass(frozen=True)
class Result:
    """What one repetition produced."""

    outputs: Prompts
    num_prompt_tokens: int

    @property
    def num_new_tokens(self) -> int:
        return sum(len(tokens) for tokens in self.outputs)


def run(name: str, generate: Generate, seed: int, repetition: int | str, scale: int = 1) -> Result:
    """Run one repetition; `scale` divides the number of requests (for warming up)."""
    rng = random.Random(f"{name}-{seed}-{repetition}")
    if name == "multiturn":
        return _multiturn(generate, rng, max(1, 8 // scale))
    if name == "prefix":
        shared = _tokens(rng, 1024)
        prompts = [shared + _tokens(rng, 64) for _ in range(max(1, 32 // scale))]
        return _one_round(generate, prompts, 32)
    lengths = random.Random(seed)
    count, sampling = {
        "mixed": (32, {}),
        "sampled": (32, {"temperature": 1.0}),
        "n8": (4, {"temperature": 1.0, "n": 8}),
    }[name]
    prompts = [_tokens(rng, lengths.randint(64, 512)) for _ in range(max(1, count // scale))]
    if sampling:
        generate = partial(generate, **sampling)
    return _one_round(generate, prompts, 64)


def _one_round(generate: Generate, prompts: Prompts, num_new: int) -> Result:
    outputs = generate(prompts, num_new)
    _check(outputs, num_new)
    return Result(outputs, sum(map(len, prompts)))


def _multiturn(generate: Generate, rng: random.Random, num_conversations: int) -> Result:
    histories: Prompts = [[] for _ in range(num_conversations)]
    outputs: Prompts = []
    num_prompt_tokens = 0
    for _ in range(6):
        for history in histories:
            history += _tokens(rng, 64)
        num_prompt_tokens += sum(map(len, histories))
        answers = generate([list(history) for history in histories], 64)
        _check(answers, 64)
        for history, answer in zip(histories, answers, strict=True):
            history += answer
        outputs += answers
    return Result(outputs, num_prompt_tokens)


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(FIRST_TOKEN, VOCAB_SIZE) for _ in range(count)]


def _check(outputs: Prompts, num_new: int) -> None:
    wrong = [len(tokens) for tokens in outputs if len(tokens) != num_new]
    if wrong:
        raise RuntimeError(f"asked for {num_new} new tokens, got answers of {wrong}")
