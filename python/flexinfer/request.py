"""Request: one prompt on its way through the engine. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flexinfer.outputs import RequestMetrics
from flexinfer.sampling_params import SamplingParams
from flexinfer.types import FinishReason

if TYPE_CHECKING:
    from flexinfer.vtensor import VTensor


@dataclass(eq=False, slots=True)
class Request:
    """
    Invariants:
    1. token_ids = prompt + output tokens; the first num_computed_tokens have KV in `vtensor`.
    2. A running request has a vTensor; a waiting one has none.
    3. A request that has ended has a finish_reason.
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
    arrival_idx: int = 0
    """Order of arrival, given by the scheduler."""
    vtensor: VTensor | None = None
    num_computed_tokens: int = 0
    num_extended_tokens: int = 0
    """Tokens that `vtensor` backs with memory."""
    num_prefill_tokens: int = 0
    """Tokens that were known at admission: prefill ends when these are computed."""
    num_cached_tokens: int | None = None
    """Cached tokens at the first admission."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] = field(init=False)
    generator: Any = None
    """torch.Generator of a request with a seed; lives here to survive preemption."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    @property
    def sort_key(self) -> tuple[int, int]:
        return (self.priority, self.arrival_idx)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed_tokens < self.num_prefill_tokens

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens that end this request."""
        if self.params.ignore_eos:
            return self.params.stop_ids
        return self.params.stop_ids | self.eos_token_ids

    @property
    def needs_min_tokens(self) -> bool:
        """True while no stop token may be chosen."""
        return self.num_output_tokens < self.params.min_tokens

    def start(self, vtensor: VTensor) -> None:
        """Waiting -> running, with a vTensor that is extended to all known tokens."""
        self.vtensor = vtensor
        self.num_computed_tokens = vtensor.num_cached_tokens
        self.num_extended_tokens = self.num_tokens
        self.num_prefill_tokens = self.num_tokens
        if self.num_cached_tokens is None:
            self.num_cached_tokens = vtensor.num_cached_tokens

    def take_vtensor(self) -> VTensor | None:
        """Give up the vTensor and with it all KV; the caller releases it."""
        vtensor, self.vtensor = self.vtensor, None
        return vtensor

    def requeue(self) -> None:
        """Running -> waiting: all tokens are to be computed again."""
        self.num_computed_tokens = 0
        self.num_extended_tokens = 0
        self.num_prefill_tokens = 0

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
