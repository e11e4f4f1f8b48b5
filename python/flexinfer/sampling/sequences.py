"""What sampling knows of each sequence: told once, as a plain value, and kept by its sampling id.

A sequence keeps its state while it is preempted, and each fork has one of its own. Tokens are
learned from the plans that compute them, not from what was drawn: a beam search may choose another
token than the most probable one. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from flexinfer.sampling.params import SamplingParams
from flexinfer.sampling.random import derive_seed
from flexinfer.sampling.token_filter import TokenFilter, filters_tokens

if TYPE_CHECKING:
    from flexinfer.sampling.grammars import TokenMatcher
    from flexinfer.sampling.logprobs import RowLogprobs


@dataclass(frozen=True, slots=True)
class SequenceSetup:
    """A sequence before its first token here."""

    sampling_id: int
    params: SamplingParams
    num_prompt_tokens: int
    prompt_token_ids: tuple[int, ...] = ()
    """Only where `reads_prompt(params)`."""
    output_token_ids: tuple[int, ...] = ()
    """Those that a fork starts with; only where `reads_output(params)`."""
    stop_token_ids: frozenset[int] = frozenset()
    """Only where min_tokens forbids them at first."""


@dataclass(slots=True)
class SequenceState:
    """A sequence between two of its tokens."""

    setup: SequenceSetup
    seed: int
    """Of its random numbers, the caller's or one derived from the engine's."""
    changes_logits: bool
    """Whether anything is done to logits before a token is chosen from them."""
    keeps_output: bool
    """Whether `output_token_ids` is kept: `reads_output(params)`."""
    num_output_tokens: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    num_drafted: int = 0
    """The last so many of the output are only proposed: see `ahead`."""
    matcher: TokenMatcher | None = None
    """Of a sequence with structured outputs, from its first token on."""
    token_filter: TokenFilter | None = None
    """What allowed_token_ids and bad words forbid."""
    scores: list[RowLogprobs] | None = None
    """Of prompt tokens 1, 2, ... so far; None if they are not asked for, or were handed over."""

    @property
    def params(self) -> SamplingParams:
        return self.setup.params

    @property
    def needs_min_tokens(self) -> bool:
        """True while no stop token may be chosen."""
        return self.num_output_tokens < self.setup.params.min_tokens

    def read(self, length: int, last_token_id: int) -> None:
        """The sequence has `length` tokens now, the last of them `last_token_id`."""
        num_output_tokens = self.num_output_tokens = length - self.setup.num_prompt_tokens
        if self.keeps_output and num_output_tokens > 0:
            self.output_token_ids[num_output_tokens - 1 :] = [last_token_id]

    def ahead(self, drafted: Sequence[int]) -> SequenceState:
        """This sequence as if it had these proposed tokens too, for one row of sampling."""
        output = self.output_token_ids
        return replace(
            self,
            num_output_tokens=self.num_output_tokens + len(drafted),
            output_token_ids=[*output, *drafted] if self.keeps_output else output,
            num_drafted=len(drafted),
            scores=None,
        )

    def accept(self, token_id: int) -> None:
        """A proposed token was drawn: it is the sequence's next one."""
        self.num_output_tokens += 1
        if self.keeps_output:
            self.output_token_ids.append(token_id)

    def add_scores(self, start: int, scores: Sequence[RowLogprobs]) -> None:
        """Scores of the prompt's tokens after position `start`; again what failed half-way."""
        if self.scores is not None:
            self.scores[start:] = scores

    def take_scores(self) -> list[RowLogprobs] | None:
        """Hand the prompt's scores over, once."""
        scores, self.scores = self.scores, None
        return scores


class SequenceStates:
    """The states of all sequences that have not been forgotten."""

    def __init__(self, seed: int) -> None:
        """`seed`: the engine's. Sequences without one of their own are numbered as they come."""
        self._seed = seed
        self._num_seen = 0
        self._states: dict[int, SequenceState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, sampling_id: int) -> SequenceState:
        return self._states[sampling_id]

    def add(self, setups: Iterable[SequenceSetup]) -> None:
        """Those that are known already, of a step that failed half-way, stay as they are."""
        for setup in setups:
            if setup.sampling_id in self._states:
                continue
            seed = setup.params.seed
            if seed is None:
                seed = derive_seed(self._seed, self._num_seen)
                self._num_seen += 1
            self._states[setup.sampling_id] = SequenceState(
                setup,
                seed,
                changes_logits(setup.params),
                reads_output(setup.params),
                output_token_ids=list(setup.output_token_ids),
                token_filter=TokenFilter(setup.params) if filters_tokens(setup.params) else None,
                scores=None if setup.params.prompt_logprobs is None else [],
            )

    def forget(self, sampling_ids: Iterable[int]) -> None:
        for sampling_id in sampling_ids:
            self._states.pop(sampling_id, None)


def changes_logits(params: SamplingParams) -> bool:
    """Whether sampling is more than temperature, top_k, top_p and min_p."""
    return (
        bool(params.logit_bias)
        or params.min_tokens > 0
        or filters_tokens(params)
        or reads_output(params)
    )


def reads_prompt(params: SamplingParams) -> bool:
    """Whether sampling needs to know the prompt's tokens."""
    return params.has_penalties or params.prompt_logprobs is not None


def reads_output(params: SamplingParams) -> bool:
    """Whether sampling needs to know the tokens generated so far."""
    return (
        params.has_penalties
        or params.structured_outputs is not None
        or bool(params.bad_words_token_ids)
    )
