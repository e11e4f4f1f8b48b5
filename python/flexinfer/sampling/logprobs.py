"""Log probabilities under the model itself: of sampled tokens, and of given ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexinfer.errors import EngineError
from flexinfer.runtime.transfer import to_device

SCORED_AT_ONCE = 256
"""Rows of a prompt."""


@dataclass(slots=True)
class RowLogprobs:
    """Log probabilities of one position, most probable first."""

    sampled: float
    sampled_rank: int
    top_token_ids: list[int]
    top_logprobs: list[float]


def gather_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], asked: Sequence[int | None]
) -> list[RowLogprobs | None]:
    """Log probabilities under the model itself, for the rows that asked for them: `asked` is their
    `SamplingParams.logprobs`."""
    found: list[RowLogprobs | None] = [None] * len(asked)
    rows = [row for row, num in enumerate(asked) if num is not None]
    if not rows:
        return found
    vocab_size = logits.shape[-1]
    wanted = [asked[row] or 0 for row in rows]
    num_top = [vocab_size if num == -1 else min(num, vocab_size) for num in wanted]
    logprobs = torch.log_softmax(logits[_ids(rows, logits)].float(), dim=-1)
    top = logprobs.topk(max(num_top))
    sampled = logprobs.gather(-1, _ids([token_ids[row] for row in rows], logits)[:, None])
    ranks = (logprobs >= sampled).sum(dim=-1).tolist()
    top_ids, top_values = top.indices.cpu(), top.values.cpu()  # one copy, not one per row
    columns = zip(rows, num_top, sampled[:, 0].tolist(), ranks, top_ids, top_values, strict=True)
    for row, num, logprob, rank, ids, values in columns:
        found[row] = RowLogprobs(logprob, rank, ids[:num].tolist(), values[:num].tolist())
    return found


def check_finite(scores: Sequence[RowLogprobs]) -> None:
    """Raises EngineError for logits that were NaN or infinite."""
    if any(math.isnan(score.sampled) for score in scores):
        raise EngineError("the model computed logits that are NaN or infinite")


@torch.inference_mode()
def score_tokens(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[RowLogprobs]:
    """Log probability of one given token per row; logits: [num_rows, vocab_size], any float dtype.

    `num_top` most probable tokens are reported too; -1: all. Some rows at a time, so that a long
    prompt needs no second tensor of the size of its logits. Raises EngineError for NaN.
    """
    found = []
    num_top = logits.shape[-1] if num_top == -1 else min(num_top, logits.shape[-1])
    for first in range(0, len(token_ids), SCORED_AT_ONCE):
        part = token_ids[first : first + SCORED_AT_ONCE]
        logprobs = torch.log_softmax(logits[first : first + len(part)].float(), dim=-1)
        given = logprobs.gather(-1, _ids(part, logits)[:, None])
        ranks = (logprobs >= given).sum(dim=-1).tolist()
        top = logprobs.topk(num_top)
        columns = (given[:, 0].tolist(), ranks, top.indices.tolist(), top.values.tolist())
        found += [RowLogprobs(*row) for row in zip(*columns, strict=True)]
    check_finite(found)
    return found


def _ids(values: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return to_device(values, torch.int64, like.device)
