"""Request: one sequence of tokens on its way through the engine. No torch.

A caller's request is one of these, or several that are forked from one (`request_group`).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING

from flexinfer.outputs import RequestMetrics
from flexinfer.sampling.params import SamplingParams
from flexinfer.types import CacheLimit, FinishReason

if TYPE_CHECKING:
    from flexinfer.vtensor import VTensor


@dataclass(eq=False, slots=True)
class Request:
    """
    Invariants:
    1. token_ids = prompt + output tokens; the first num_computed_tokens have KV in `vtensor`, and
       steps that have been launched compute those up to num_launched_tokens, of which the last may
       be a token that is not known yet.
    2. A running request has a vTensor, a swapped one an empty one; a waiting one has none.
    3. A request that has ended has a finish_reason.
    4. `siblings` and `num_forks` are empty and 0 once the prompt is computed: the forks run then.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_num_tokens: int
    """The request ends when it has this many tokens, prompt and output together."""
    metrics: RequestMetrics
    eos_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    """A lower number goes first."""
    cache_salt: str = ""
    """With the adapter's part: KV is shared among equal ones alone."""
    adapter: int = 0
    """The number of its LoRA adapter; 0: none."""
    arrival_idx: int = 0
    """Order of arrival, given by the scheduler."""
    deadline: int = 0
    """The number of admissions after which this request is overdue; see queue.py."""
    is_overdue: bool = False
    """It was passed over as often as is allowed, and goes before all that came later."""
    index: int = 0
    """Which sequence of its group this is."""
    num_forks: int = 0
    """Sequences that will be forked from this one when its prompt is computed."""
    siblings: list[Request] = field(default_factory=list)
    """Those of them that sample their first token from this prompt's logits."""
    may_speculate: bool = True
    """Whether tokens may be proposed ahead: not where several sequences go on from one prompt, nor
    after a step that failed with a proposal."""
    vtensor: VTensor | None = None
    num_computed_tokens: int = 0
    num_launched_tokens: int = 0
    state: VTensor | None = None
    """The recurrent state behind the computed tokens; see states.py."""
    next_state: VTensor | None = None
    """Where a step writes the next one, if not in place."""
    is_state_shared: bool = False
    """Whether others see `state`: it is not written then."""
    is_state_swapped: bool = False
    """Whether `state` is in the host store."""
    stop_every: int | None = None
    """A step ends at multiples of so many tokens."""
    num_extended_tokens: int = 0
    """Tokens that `vtensor` backs with memory."""
    is_forked: bool = False
    """Whether another has begun with the same KV: to go on takes a copy of the row where they part,
    even when that one has ended."""
    num_asked_rows: int = 0
    """Rows that the worker was asked to map, ahead of need."""
    num_prefill_tokens: int = 0
    """Tokens that were known at admission: prefill ends when these are computed."""
    num_cached_tokens: int | None = None
    """Cached tokens at the first admission."""
    cache_limit: CacheLimit | None = None
    """Why no more than these were."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] = field(init=False)
    """Tokens are only appended."""
    _token_array: array[int] = field(init=False, repr=False)
    num_scored_tokens: int = 0
    """Prompt tokens whose successors have log probabilities; only with params.prompt_logprobs."""
    sampling_id: int = field(init=False, default_factory=count().__next__)
    """What plans call this sequence; of all requests of this process no other has it."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self._token_array = array("i")

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def token_array(self) -> array[int]:
        """`token_ids` as the manager wants them: a buffer that is not converted at each use."""
        tokens = self._token_array
        if len(tokens) < len(self.token_ids):
            tokens.extend(self.token_ids[len(tokens) :])
        return tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def num_reusable_tokens(self) -> int:
        """Most tokens whose KV may be found instead of computed: not the last one's, whose logits
        are needed, nor those of a prompt whose log probabilities are."""
        num_prompt_tokens = len(self.prompt_token_ids)
        if self.params.prompt_logprobs is None or self.num_scored_tokens >= num_prompt_tokens - 1:
            return self.num_tokens - 1
        return self.num_scored_tokens

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed_tokens < self.num_prefill_tokens

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_in_flight(self) -> bool:
        """Whether a step has been launched for it whose result is not known."""
        return self.num_launched_tokens > self.num_computed_tokens

    @property
    def has_next_token(self) -> bool:
        """Whether there is a token to compute beyond those that were launched, unless the one that
        is being sampled ends the request."""
        if self.is_finished:
            return False
        num_tokens = self.num_tokens
        return self.num_launched_tokens < num_tokens or num_tokens + 1 < self.max_num_tokens

    @property
    def stop_message(self) -> str | None:
        """`stop_reason` where it is text, as after an error."""
        return self.stop_reason if isinstance(self.stop_reason, str) else None

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens that end this request."""
        if self.params.ignore_eos:
            return self.params.stop_ids
        return self.params.stop_ids | self.eos_token_ids

    def start(self, vtensor: VTensor, num_extended_tokens: int) -> None:
        """Waiting -> running, with a vTensor that is extended to `num_extended_tokens`."""
        self.vtensor = vtensor
        self.num_computed_tokens = self.num_launched_tokens = vtensor.num_cached_tokens
        self.num_extended_tokens = num_extended_tokens
        self.num_asked_rows = 0
        self.num_prefill_tokens = self.num_tokens
        if self.num_cached_tokens is None:
            self.num_cached_tokens = min(vtensor.num_cached_tokens, len(self.prompt_token_ids))

    def start_forked(self, parent: Request, vtensor: VTensor) -> None:
        """Straight to running, with a fork of the parent's vTensor: its KV is ours."""
        self.vtensor = vtensor
        self.num_computed_tokens = self.num_launched_tokens = parent.num_computed_tokens
        self.num_asked_rows = 0
        self.num_extended_tokens = parent.num_computed_tokens
        self.num_prefill_tokens = parent.num_computed_tokens
        self.num_cached_tokens = parent.num_cached_tokens
        self.cache_limit = parent.cache_limit

    def clone(self, request_id: str, index: int, params: SamplingParams) -> Request:
        """Another request with the same tokens so far, without KV; the metrics are shared."""
        clone = replace(
            self,
            request_id=request_id,
            index=index,
            params=params,
            num_forks=0,
            siblings=[],
            vtensor=None,
            state=None,
            next_state=None,
            num_scored_tokens=0,
        )
        clone.requeue()
        clone.token_ids = list(self.token_ids)
        return clone

    @property
    def state_slots(self) -> tuple[int, int] | None:
        """The slots of the states that a step reads, -1: there is none yet, and writes. None: the
        model keeps no state."""
        written = self.state if self.next_state is None else self.next_state
        if written is None:
            return None
        return -1 if self.state is None else self.state.slot, written.slot

    def take_vtensors(self) -> list[VTensor]:
        """Give up all memory, KV and states; the caller releases it."""
        held = self.vtensor, self.state, self.next_state
        self.vtensor = self.state = self.next_state = None
        self.is_state_shared = self.is_state_swapped = False
        return [vtensor for vtensor in held if vtensor is not None]

    def requeue(self) -> None:
        """Running -> waiting: all tokens are to be computed again."""
        self.num_computed_tokens = self.num_launched_tokens = 0
        self.num_extended_tokens = 0
        self.num_prefill_tokens = 0
        self.is_forked = False

    def note_scored(self, num_computed_tokens: int) -> None:
        """The prompt is scored as far as it is computed, but for what follows its last token."""
        if self.params.prompt_logprobs is not None:
            last = min(num_computed_tokens, len(self.prompt_token_ids) - 1)
            self.num_scored_tokens = max(self.num_scored_tokens, last)

    def append(self, token_id: int) -> None:
        """Add a sampled token, and end the request if the token or the length says so."""
        self.token_ids.append(token_id)
        past_min_tokens = self.num_output_tokens >= self.params.min_tokens
        if past_min_tokens and token_id in self.stop_token_ids:
            by_eos = token_id in self.eos_token_ids and not self.params.ignore_eos
            self.finish("stop", None if by_eos else token_id)
        elif self.num_tokens >= self.max_num_tokens:
            self.finish("length")

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        self.finish_reason = reason
        self.stop_reason = stop_reason
