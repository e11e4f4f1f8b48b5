"""Token batches for training: whole dialogues, sorted by length and padded on the right."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from dialogues import TRAIN, Dialogue, dialogue, drill, recall_dialogue
from tokenizer import BEGIN, END, ROLES
from tokenizers import Tokenizer

IGNORE = -100


@dataclass
class Encoded:
    """A dialogue's token ids, its labels and, per exchange, the answer's range and kind."""

    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    answers: list[tuple[int, int, str]] = field(default_factory=list)

    def add(self, ids: list[int], learn: bool) -> None:
        """Append tokens; only the assistant's own tokens are learnt."""
        self.ids += ids
        self.labels += ids if learn else [IGNORE] * len(ids)


def encode(tokenizer: Tokenizer, spoken: Dialogue) -> Encoded:
    """Encode a dialogue exactly as the chat template renders it."""
    end = tokenizer.token_to_id(END)
    role = {name: tokenizer.token_to_id(token) for name, token in ROLES.items()}
    result = Encoded()
    result.add([tokenizer.token_to_id(BEGIN)], learn=False)
    if spoken.system.text is not None:
        text = tokenizer.encode(spoken.system.text).ids
        result.add([role["system"], *text, end], learn=False)
    for exchange in spoken.exchanges:
        user = tokenizer.encode(exchange.user).ids
        result.add([role["user"], *user, end, role["assistant"]], learn=False)
        start = len(result.ids)
        result.add([*tokenizer.encode(exchange.answer).ids, end], learn=True)
        result.answers.append((start, len(result.ids), exchange.kind))
    return result


def draw(rng: random.Random, progress: float, split: str = TRAIN) -> Dialogue:
    """A dialogue of the curriculum: short ones first, long system prompts last."""
    if progress < 0.12:
        return dialogue(rng, split, rng.randint(2, 4), long_share=0.0)
    if rng.random() < 0.25:
        return drill(rng, split)
    long_share = 0.1 if progress < 0.45 else 0.3
    if rng.random() < 0.35:
        return recall_dialogue(rng, split, long_share=long_share)
    return dialogue(rng, split, long_share=long_share)


def pad(rows: list[Encoded], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Stack rows into ids and labels."""
    width = max(len(row.ids) for row in rows)
    ids = [row.ids + [pad_id] * (width - len(row.ids)) for row in rows]
    labels = [row.labels + [IGNORE] * (width - len(row.ids)) for row in rows]
    return torch.tensor(ids), torch.tensor(labels)


def batches(
    tokenizer: Tokenizer, rng: random.Random, progress: float, tokens: int, pool: int = 600
) -> Iterator[list[Encoded]]:
    """One pool of dialogues as shuffled batches of similar lengths."""
    rows = [encode(tokenizer, draw(rng, progress)) for _ in range(pool)]
    rows.sort(key=lambda row: len(row.ids))
    groups: list[list[Encoded]] = [[]]
    for row in rows:
        if (len(groups[-1]) + 1) * len(row.ids) > tokens:
            groups.append([])
        groups[-1].append(row)
    rng.shuffle(groups)
    yield from groups
