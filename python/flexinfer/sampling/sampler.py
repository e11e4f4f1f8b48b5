"""Sampler: from a step's logits to one token for each sequence, vectorised over the sequences.

Meaning and order of the steps are vLLM's: logit bias and min_tokens; repetition, frequency,
presence penalty; structured outputs and token filters; temperature; min_p; top_k; top_p. A token is
drawn by one uniform number per row, looked up in the cumulative sum of its probabilities: on the
CPU by a kernel of our own, elsewhere by torch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from flexinfer.errors import VTensorError
from flexinfer.runtime.panics import panics_as_errors
from flexinfer.runtime.transfer import HostCopy, to_device
from flexinfer.sampling import host_sampler
from flexinfer.sampling.grammars import GrammarCompiler, TokenMatcher
from flexinfer.sampling.logprobs import RowLogprobs, gather_logprobs
from flexinfer.sampling.params import NO_TOKEN_LEFT, SamplingParams
from flexinfer.sampling.random import uniforms
from flexinfer.sampling.sequences import SequenceState, SequenceStates

logger = logging.getLogger(__name__)

REJECTED = "no token can be chosen behind what is only proposed"
"""Of such a row nobody asks why: that would cost a pass over its logits."""

MAX_TEMPERATURE = 1e30
"""As the kernel's: one that float32 has; all tokens are equally probable long before."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens on their way from the device, or the error that there was on the way to them."""

    logits: torch.Tensor
    states: Sequence[SequenceState]
    token_ids: list[int] | HostCopy
    error: Exception | None = None

    @property
    def on_device(self) -> torch.Tensor:
        """[num_sequences] int64; what a failed row has is no token."""
        if isinstance(self.token_ids, HostCopy):
            return self.token_ids.tensor
        return to_device(self.token_ids, torch.int64, self.logits.device)


@dataclass(slots=True)
class SamplerOutput:
    """One entry per sequence, in the order of the batch."""

    token_ids: list[int]
    """-1 for a row that failed."""
    logprobs: list[RowLogprobs | None]
    errors: dict[int, str]
    """Row -> why it failed, for those that did."""


class Sampler:
    """Owns what sampling knows of each sequence. Not thread-safe."""

    def __init__(
        self, seed: int, device: torch.device, grammars: GrammarCompiler | None = None
    ) -> None:
        """grammars: needed for sequences with structured outputs."""
        self.device = device
        self._grammars = grammars
        self.sequences = SequenceStates(seed)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, states: Sequence[SequenceState]) -> SamplerOutput:
        """logits: [num_sequences, vocab_size], any float dtype; not changed.

        A row that fails, at whatever stage, fails alone: the others are then sampled one by one,
        which gives the same tokens.
        """
        return self.finish(self.begin(logits, states))

    @torch.inference_mode()
    def begin(self, logits: torch.Tensor, states: Sequence[SequenceState]) -> Drawn:
        """The first half of `sample`, which does not wait for the device."""
        try:
            with panics_as_errors:
                return Drawn(logits, states, self._choose(logits, states))
        except torch.OutOfMemoryError:
            raise  # of the whole step
        except Exception as error:
            return Drawn(logits, states, [-1] * len(states), error)

    @torch.inference_mode()
    def finish(self, drawn: Drawn) -> SamplerOutput:
        """The second half: waits for the tokens."""
        logits, states, error = drawn.logits, drawn.states, drawn.error
        try:
            if error is None:
                return _output(drawn)
        except torch.OutOfMemoryError:
            raise
        except Exception as failure:
            error = failure
        if len(states) == 1:
            assert error is not None
            logger.warning("a sequence cannot be sampled", exc_info=error)
            return SamplerOutput([-1], [None], {0: describe(error)})
        parts = [self.sample(logits[row : row + 1], [state]) for row, state in enumerate(states)]
        return SamplerOutput(
            [part.token_ids[0] for part in parts],
            [part.logprobs[0] for part in parts],
            {row: part.errors[0] for row, part in enumerate(parts) if part.errors},
        )

    def _choose(
        self, logits: torch.Tensor, states: Sequence[SequenceState]
    ) -> list[int] | HostCopy:
        changed = [row for row, state in enumerate(states) if state.changes_logits]
        if 2 * len(changed) > len(states) or (changed and not host_sampler.supports(logits)):
            logits, changed = self._process(logits, states), []
        if not host_sampler.supports(logits):
            return HostCopy(choose_by_torch(logits.float(), states))
        drawn = choose(logits, states)
        if changed:  # anew: the logits of all others are read where they stand
            of_rows = [states[row] for row in changed]
            again = choose(self._process(logits[_ids(changed, logits)], of_rows), of_rows)
            for row, token_id in zip(changed, again, strict=True):
                drawn[row] = token_id
        return drawn

    def _process(self, logits: torch.Tensor, states: Sequence[SequenceState]) -> torch.Tensor:
        """float32 logits to choose from; `logits` stay as they are."""
        logits = apply_penalties(apply_bias(logits.float(), states), states)
        return self._forbid(logits, states)

    def _forbid(self, logits: torch.Tensor, states: Sequence[SequenceState]) -> torch.Tensor:
        """Forbid what structured outputs and token filters do not allow. Returns a copy if it
        changes any row."""
        rows = [i for i, s in enumerate(states) if s.token_filter or s.params.structured_outputs]
        if not rows:
            return logits
        forbidden = np.zeros(logits.shape, dtype=np.bool_)
        for row in rows:
            state = states[row]
            if state.params.structured_outputs is not None:
                matcher = state.matcher = state.matcher or self._new_matcher(state.params)
                forbidden[row] = ~matcher.allowed(state.output_token_ids, state.num_drafted)
            if state.token_filter is not None:
                forbidden[row] |= state.token_filter.forbidden(
                    state.output_token_ids, logits.shape[1]
                )
        masked = logits.masked_fill(torch.from_numpy(forbidden).to(logits.device), -torch.inf)
        # A NaN makes its row fail even where it was forbidden.
        masked[:, 0].masked_fill_(logits.amax(dim=-1).isnan(), torch.nan)
        return masked

    def _new_matcher(self, params: SamplingParams) -> TokenMatcher:
        assert self._grammars is not None
        assert params.structured_outputs is not None
        return self._grammars.matcher(params.structured_outputs)


def _output(drawn: Drawn) -> SamplerOutput:
    logits, token_ids = drawn.logits, drawn.token_ids
    if isinstance(token_ids, HostCopy):
        token_ids = token_ids.tolist()
    errors = {
        row: REJECTED if state.num_drafted else explain_failure(logits[row])
        for row, (token, state) in enumerate(zip(token_ids, drawn.states, strict=True))
        if token < 0
    }
    asked = [
        None if row in errors else state.params.logprobs for row, state in enumerate(drawn.states)
    ]
    return SamplerOutput(token_ids, gather_logprobs(logits, token_ids, asked), errors)


def choose(logits: torch.Tensor, states: Sequence[SequenceState]) -> list[int]:
    """One token per row; -1 for a row with a NaN, or without a finite maximum.

    logits: [num_rows, vocab_size], which `host_sampler.supports`.
    """
    params = [state.params for state in states]
    return host_sampler.draw_rows(
        logits,
        [0.0 if p.is_greedy else p.temperature for p in params],
        [min(p.top_k, logits.shape[1]) for p in params],
        [p.top_p for p in params],
        [p.min_p for p in params],
        random_numbers(states),
    )


def choose_by_torch(logits: torch.Tensor, states: Sequence[SequenceState]) -> torch.Tensor:
    """As `choose`, on any device, [num_rows] int64; logits: float32."""
    random_rows = [i for i, state in enumerate(states) if not state.params.is_greedy]
    if len(random_rows) == len(states):
        return draw(logits, states)
    best = logits.max(dim=-1)  # of a row with a NaN it is NaN
    chosen = best.indices.masked_fill_(~best.values.isfinite(), -1)
    if random_rows:
        rows = _ids(random_rows, logits)
        chosen.index_copy_(0, rows, draw(logits[rows], [states[i] for i in random_rows]))
    return chosen


def random_numbers(states: Sequence[SequenceState]) -> list[float]:
    """In [0, 1), one per row; 0 where none is drawn."""
    drawn = [state for state in states if not state.params.is_greedy]
    numbers = uniforms([s.seed for s in drawn], [s.num_output_tokens for s in drawn])
    if len(drawn) == len(states):
        return numbers
    rest = iter(numbers)
    return [0.0 if state.params.is_greedy else next(rest) for state in states]


def draw(logits: torch.Tensor, states: Sequence[SequenceState]) -> torch.Tensor:
    """One random token per row, [num_rows] int64; -1 where `choose` says so."""
    params = [state.params for state in states]
    temperatures = [min(p.temperature, MAX_TEMPERATURE) for p in params]
    logits = logits / _column(temperatures, logits)
    logits = apply_min_p(logits, [p.min_p for p in params])
    logits = apply_top_k_top_p(logits, [p.top_k for p in params], [p.top_p for p in params])
    sums = torch.softmax(logits, dim=-1).cumsum(dim=-1)
    total = sums[:, -1:]
    # Below the total, which rounding could reach: beyond it there is no token.
    targets = torch.minimum(
        _column(random_numbers(states), logits) * total, torch.nextafter(total, -total)
    )
    drawn = torch.searchsorted(sums, targets, right=True)
    return drawn.masked_fill_(~total.isfinite(), -1)[:, 0]


def explain_failure(logits: torch.Tensor) -> str:
    """Why no token can be chosen from this row of the model's logits, [vocab_size]."""
    if bool(logits.isfinite().all()):
        return NO_TOKEN_LEFT
    return "the model computed logits that are NaN or infinite"


def describe(error: Exception) -> str:
    """For the caller whose sequence failed."""
    return str(error) if isinstance(error, VTensorError) else f"{type(error).__name__}: {error}"


def apply_bias(logits: torch.Tensor, states: Sequence[SequenceState]) -> torch.Tensor:
    """Add logit_bias, and forbid stop tokens before min_tokens; copies if that changes any."""
    rows, columns, values = [], [], []
    for row, state in enumerate(states):
        for token_id, bias in (state.params.logit_bias or {}).items():
            rows.append(row)
            columns.append(token_id)
            values.append(min(100.0, max(-100.0, float(bias))))
        if state.needs_min_tokens:
            for token_id in state.setup.stop_token_ids:
                if token_id >= logits.shape[-1]:
                    continue  # a model may name end tokens that its vocabulary lacks
                rows.append(row)
                columns.append(token_id)
                values.append(-torch.inf)
    if not rows:
        return logits
    added = to_device(values, logits.dtype, logits.device)
    return logits.index_put((_ids(rows, logits), _ids(columns, logits)), added, accumulate=True)


def apply_penalties(logits: torch.Tensor, states: Sequence[SequenceState]) -> torch.Tensor:
    """Repetition, frequency and presence penalty. Returns a copy if it changes any row."""
    penalised = [state for state in states if state.params.has_penalties]
    if not penalised:
        return logits
    rows = _ids([i for i, r in enumerate(states) if r.params.has_penalties], logits)
    params = [state.params for state in penalised]
    part = logits[rows]
    in_output = count_tokens([state.output_token_ids for state in penalised], part)
    in_prompt = count_tokens([state.setup.prompt_token_ids for state in penalised], part)

    repetition = _column([p.repetition_penalty for p in params], part)
    repeated = torch.where(part > 0, part / repetition, part * repetition)
    part = torch.where((in_output > 0) | (in_prompt > 0), repeated, part)
    part -= _column([p.frequency_penalty for p in params], part) * in_output
    part -= _column([p.presence_penalty for p in params], part) * (in_output > 0)
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
    bound = probs.amax(dim=-1, keepdim=True) * _column(min_p, probs)
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
        drop = below <= 1.0 - _column(top_p, below)
        drop[:, -1] = False
        logits = logits.masked_fill(drop.scatter(-1, order, drop), -torch.inf)
    return logits


def _ids(values: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return to_device(values, torch.int64, like.device)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """[len(values), 1]"""
    return to_device(values, like.dtype, like.device)[:, None]
