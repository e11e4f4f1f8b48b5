"""Sampler: from a step's logits to one token for each request, vectorised over the requests.

Meaning and order of the steps are vLLM's: logit bias and min_tokens; repetition, frequency,
presence penalty; structured outputs; temperature; min_p; top_k; top_p. Random choice is by the
exponential race (argmax of p / e with e exponential), which needs no cumulative sum and takes a
generator a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from flexinfer.runtime.transfer import to_device
from flexinfer.sampling.grammars import GrammarCompiler
from flexinfer.sampling.params import SamplingParams

SCORED_AT_ONCE = 256
"""Rows of a prompt."""


class SamplingRequest(Protocol):
    """What the sampler asks of a request (`flexinfer.scheduler.request.Request` is one)."""

    params: SamplingParams
    generator: Any
    matcher: Any

    @property
    def prompt_token_ids(self) -> list[int]: ...
    @property
    def output_token_ids(self) -> list[int]: ...
    @property
    def stop_token_ids(self) -> frozenset[int]: ...
    @property
    def needs_min_tokens(self) -> bool: ...


@dataclass(slots=True)
class RowLogprobs:
    """Log probabilities of one position, most probable first."""

    sampled: float
    sampled_rank: int
    top_token_ids: list[int]
    top_logprobs: list[float]


@dataclass(slots=True)
class SamplerOutput:
    """One entry a request, in the order of the batch."""

    token_ids: list[int]
    logprobs: list[RowLogprobs | None]


class Sampler:
    """Holds the engine's random numbers; those of seeded requests live in the requests."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self.grammars: GrammarCompiler | None = None
        """Needed for requests with structured outputs."""
        self._generator = torch.Generator(device).manual_seed(seed)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, requests: Sequence[SamplingRequest]) -> SamplerOutput:
        """logits: [num_requests, vocab_size], any float dtype; not changed."""
        raw = logits.float()
        processed = apply_penalties(apply_bias(raw, requests), requests)
        processed = self._apply_structure(processed, requests)
        chosen = processed.argmax(dim=-1)
        random_rows = [i for i, request in enumerate(requests) if not request.params.is_greedy]
        if len(random_rows) == len(requests):
            chosen = self._draw(processed, requests)
        elif random_rows:
            rows = _ids(random_rows, raw)
            drawn = self._draw(processed[rows], [requests[i] for i in random_rows])
            chosen.index_copy_(0, rows, drawn)
        logprobs = gather_logprobs(raw, chosen, requests)
        return SamplerOutput(chosen.tolist(), logprobs)

    def _apply_structure(
        self, logits: torch.Tensor, requests: Sequence[SamplingRequest]
    ) -> torch.Tensor:
        """Forbid what structured outputs do not allow. Returns a copy if it changes any row."""
        rows = [i for i, request in enumerate(requests) if request.params.structured_outputs]
        if not rows:
            return logits
        assert self.grammars is not None
        forbidden = np.zeros(logits.shape, dtype=np.bool_)
        for row in rows:
            request = requests[row]
            if request.matcher is None:
                structure = request.params.structured_outputs
                assert structure is not None
                request.matcher = self.grammars.matcher(structure)
            forbidden[row] = ~request.matcher.allowed(request.output_token_ids)
        return logits.masked_fill(torch.from_numpy(forbidden).to(logits.device), -torch.inf)

    def _draw(self, logits: torch.Tensor, requests: Sequence[SamplingRequest]) -> torch.Tensor:
        """One random token a row, [num_rows] int64."""
        params = [request.params for request in requests]
        logits = logits / self._column([p.temperature for p in params])
        logits = apply_min_p(logits, [p.min_p for p in params])
        logits = apply_top_k_top_p(logits, [p.top_k for p in params], [p.top_p for p in params])
        probs = torch.softmax(logits, dim=-1)
        noise = torch.empty_like(probs)
        if any(p.seed is None for p in params):
            noise.exponential_(generator=self._generator)
        for row, request in enumerate(requests):
            if request.params.seed is not None:
                noise[row].exponential_(generator=self._own_generator(request))
        return probs.div_(noise).argmax(dim=-1)

    def _own_generator(self, request: SamplingRequest) -> torch.Generator:
        if request.generator is None:
            request.generator = torch.Generator(self.device).manual_seed(request.params.seed)  # type: ignore[arg-type]
        generator: torch.Generator = request.generator
        return generator

    def _column(self, values: Sequence[float]) -> torch.Tensor:
        return to_device(values, torch.float32, self.device)[:, None]


def apply_bias(logits: torch.Tensor, requests: Sequence[SamplingRequest]) -> torch.Tensor:
    """Add logit_bias, and forbid stop tokens before min_tokens; copies if that changes any."""
    rows, columns, values = [], [], []
    for row, request in enumerate(requests):
        for token_id, bias in (request.params.logit_bias or {}).items():
            rows.append(row)
            columns.append(token_id)
            values.append(min(100.0, max(-100.0, float(bias))))
        if request.needs_min_tokens:
            for token_id in request.stop_token_ids:
                rows.append(row)
                columns.append(token_id)
                values.append(-torch.inf)
    if not rows:
        return logits
    added = to_device(values, logits.dtype, logits.device)
    return logits.index_put((_ids(rows, logits), _ids(columns, logits)), added, accumulate=True)


def apply_penalties(logits: torch.Tensor, requests: Sequence[SamplingRequest]) -> torch.Tensor:
    """Repetition, frequency and presence penalty. Returns a copy if it changes any row."""
    penalised = [request for request in requests if request.params.has_penalties]
    if not penalised:
        return logits
    rows = _ids([i for i, r in enumerate(requests) if r.params.has_penalties], logits)
    params = [request.params for request in penalised]
    part = logits[rows]
    in_output = count_tokens([request.output_token_ids for request in penalised], part)
    in_prompt = count_tokens([request.prompt_token_ids for request in penalised], part)

    def column(values: list[float]) -> torch.Tensor:
        return to_device(values, part.dtype, part.device)[:, None]

    repetition = column([p.repetition_penalty for p in params])
    repeated = torch.where(part > 0, part / repetition, part * repetition)
    part = torch.where((in_output > 0) | (in_prompt > 0), repeated, part)
    part -= column([p.frequency_penalty for p in params]) * in_output
    part -= column([p.presence_penalty for p in params]) * (in_output > 0)
    result = logits.clone()
    result[rows] = part
    return result


def count_tokens(token_ids: Sequence[Sequence[int]], like: torch.Tensor) -> torch.Tensor:
    """[num_rows, vocab_size]: how often each token occurs in each row's list."""
    counts = torch.zeros_like(like)
    flat_rows = [row for row, ids in enumerate(token_ids) for _ in ids]
    flat_ids = [token_id for ids in token_ids for token_id in ids]
    where = (_ids(flat_rows, like), _ids(flat_ids, like))
    return counts.index_put_(where, counts.new_ones(len(flat_ids)), accumulate=True)


def apply_min_p(logits: torch.Tensor, min_p: Sequence[float]) -> torch.Tensor:
    """Drop tokens whose probability is below min_p times the largest of the row."""
    if not any(min_p):
        return logits
    probs = torch.softmax(logits, dim=-1)
    column = to_device(min_p, probs.dtype, probs.device)[:, None]
    bound = probs.amax(dim=-1, keepdim=True) * column
    return logits.masked_fill(probs < bound, -torch.inf)


def apply_top_k_top_p(
    logits: torch.Tensor, top_k: Sequence[int], top_p: Sequence[float]
) -> torch.Tensor:
    """Keep the top_k most probable tokens (0, -1: all), of these the top_p nucleus."""
    vocab_size = logits.shape[-1]
    ks = [min(k, vocab_size) if k > 0 else vocab_size for k in top_k]
    if any(k < vocab_size for k in ks):
        largest = logits.topk(max(k for k in ks if k < vocab_size))
        bounded = [min(k, largest.values.shape[-1]) for k in ks]
        bound = largest.values.gather(-1, _ids(bounded, logits)[:, None] - 1)
        keep_all = to_device([k == vocab_size for k in ks], torch.bool, logits.device)[:, None]
        logits = logits.masked_fill((logits < bound) & ~keep_all, -torch.inf)
    if any(p < 1.0 for p in top_p):
        ascending, order = logits.sort(dim=-1)
        below = torch.softmax(ascending, dim=-1).cumsum(dim=-1)
        drop = below <= 1.0 - to_device(top_p, below.dtype, below.device)[:, None]
        drop[:, -1] = False
        logits = logits.masked_fill(drop.scatter(-1, order, drop), -torch.inf)
    return logits


def gather_logprobs(
    raw: torch.Tensor, chosen: torch.Tensor, requests: Sequence[SamplingRequest]
) -> list[RowLogprobs | None]:
    """Log probabilities under the model itself, for the rows that asked for them."""
    found: list[RowLogprobs | None] = [None] * len(requests)
    rows = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
    if not rows:
        return found
    vocab_size = raw.shape[-1]
    asked = [requests[row].params.logprobs or 0 for row in rows]
    num_top = [vocab_size if num == -1 else min(num, vocab_size) for num in asked]
    where = _ids(rows, raw)
    logprobs = torch.log_softmax(raw[where], dim=-1)
    top = logprobs.topk(max(num_top))
    sampled = logprobs.gather(-1, chosen[where][:, None])
    ranks = (logprobs >= sampled).sum(dim=-1).tolist()
    top_ids, top_values = top.indices.cpu(), top.values.cpu()  # one copy, not one a row
    columns = zip(rows, num_top, sampled[:, 0].tolist(), ranks, top_ids, top_values, strict=True)
    for row, num, logprob, rank, ids, values in columns:
        found[row] = RowLogprobs(logprob, rank, ids[:num].tolist(), values[:num].tolist())
    return found


@torch.inference_mode()
def score_tokens(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[RowLogprobs]:
    """Log probability of one given token a row; logits: [num_rows, vocab_size], any float dtype.

    `num_top` most probable tokens are reported too; -1: all. Some rows at a time, so that a long
    prompt needs no second tensor of the size of its logits.
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
    return found


def _ids(values: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return to_device(values, torch.int64, like.device)
