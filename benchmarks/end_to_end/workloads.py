"""The workloads, as token ids: greedy, end of text ignored, the same for every engine.

single     one request (vTensor, Fig. 9)
shared     requests with a long common prefix and a part of their own (Fig. 10: 12K + 4K)
multiturn  conversations whose turns are submitted together (Fig. 11)
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], Prompts]
"""(prompts, new tokens of each) -> new tokens."""

NAMES = ("single", "shared", "multiturn")


@dataclass(frozen=True)
class Sizes:
    """Tokens and counts; `full` is the paper's, `toy` is to see the benchmark work."""

    single_prompt: int
    single_new: int
    shared_prefix: int
    shared_own: int
    shared_requests: int
    shared_new: int
    conversations: int
    turns: int
    turn_prompt: int
    turn_new: int

    @property
    def max_len(self) -> int:
        """The longest request."""
        return max(
            self.single_prompt + self.single_new,
            self.shared_prefix + self.shared_own + self.shared_new,
            self.turns * (self.turn_prompt + self.turn_new),
        )

    @property
    def max_requests(self) -> int:
        return max(self.shared_requests, self.conversations)

    def halved(self) -> Sizes:
        """The same lengths, half as many requests at once."""
        fewer = {"shared_requests": self.shared_requests, "conversations": self.conversations}
        return replace(self, **{name: max(1, count // 2) for name, count in fewer.items()})


FULL = Sizes(2048, 256, 12_288, 4_096, 8, 64, 16, 4, 512, 128)
TOY = Sizes(32, 8, 96, 32, 3, 6, 2, 2, 16, 6)


@dataclass(frozen=True)
class Result:
    outputs: Prompts
    num_prompt_tokens: int

    @property
    def num_new_tokens(self) -> int:
        return sum(map(len, self.outputs))


def run(name: str, sizes: Sizes, vocab_size: int, generate: Generate, seed: int) -> Result:
    """One repetition; contents depend on the seed, so that none is a cache hit of another."""
    rng = random.Random(f"{name}-{seed}")

    def tokens(count: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(count)]

    if name == "single":
        return one_round(generate, [tokens(sizes.single_prompt)], sizes.single_new)
    if name == "shared":
        prefix = tokens(sizes.shared_prefix)
        prompts = [prefix + tokens(sizes.shared_own) for _ in range(sizes.shared_requests)]
        return one_round(generate, prompts, sizes.shared_new)
    histories: Prompts = [[] for _ in range(sizes.conversations)]
    outputs: Prompts = []
    num_prompt_tokens = 0
    for _ in range(sizes.turns):
        for history in histories:
            history += tokens(sizes.turn_prompt)
        num_prompt_tokens += sum(map(len, histories))
        answers = generate([list(history) for history in histories], sizes.turn_new)
        check(answers, sizes.turn_new)
        for history, answer in zip(histories, answers, strict=True):
            history += answer
        outputs += answers
    return Result(outputs, num_prompt_tokens)


def one_round(generate: Generate, prompts: Prompts, num_new: int) -> Result:
    outputs = generate(prompts, num_new)
    check(outputs, num_new)
    return Result(outputs, sum(map(len, prompts)))


def check(outputs: Prompts, num_new: int) -> None:
    wrong = [len(tokens) for tokens in outputs if len(tokens) != num_new]
    if wrong:
        raise RuntimeError(f"asked for {num_new} new tokens, got answers of {wrong}")
