"""What the engine gives back for a request. Names and fields are those of vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from flexinfer.types import CacheLimit, FinishReason


@dataclass(slots=True)
class Logprob:
    """Natural logarithm of a token's probability under the model."""

    logprob: float
    rank: int | None = None
    """1 is the most probable token of the vocabulary."""
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""Token id -> Logprob, of one position."""


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a request."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    """Sum over the generated tokens; None if log probabilities were not asked for."""
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    """None while the request runs."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it; after an error, its message."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times (seconds, `time.monotonic`) and memory events of one request."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_computed_tokens: int = 0
    """Tokens that went through the model, recomputation included."""
    num_generated_tokens: int = 0
    """Of all samples together."""
    num_token_steps: int = 0
    """Steps in which one or more of them got a token."""
    chunks_aliased: int = 0
    """Physical chunks that its admissions shared instead of filling."""
    chunks_copied: int = 0
    """Tail chunks copied because others share them; known when it leaves the running set."""

    # The same by the names that vLLM has since its second engine.

    @property
    def num_generation_tokens(self) -> int:
        return self.num_generated_tokens

    @property
    def queued_ts(self) -> float:
        return self.arrival_time

    @property
    def scheduled_ts(self) -> float:
        return self.first_scheduled_time or 0.0

    @property
    def first_token_ts(self) -> float:
        return self.first_token_time or 0.0

    @property
    def last_token_ts(self) -> float:
        return self.last_token_time or 0.0

    @property
    def first_token_latency(self) -> float:
        return self.time_to_first_token_s or 0.0

    @property
    def time_to_first_token_s(self) -> float | None:
        if self.first_token_time is None:
            return None
        return self.first_token_time - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """State of a request after a step; `SamplingParams.output_kind` says what it carries."""

    request_id: str
    prompt: str | None
    """None if the prompt came as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int | None = None
    """Prompt tokens whose KV was found in the prefix cache; None before the first step."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Of each prompt token, the first one's being None; None as long as they are not computed."""
    lora_request: Any = None
    """The `LoRARequest` that it has chosen."""
    cache_limit: CacheLimit | None = None
    """Why `num_cached_tokens` is no larger; None before the first step."""


def joined(first: RequestOutput, then: RequestOutput) -> RequestOutput:
    """Two DELTA outputs of a request, in their order, as one."""
    parts = {completion.index: completion for completion in first.outputs}
    for new in then.outputs:
        old = parts.get(new.index)
        parts[new.index] = new if old is None else _joined(old, new)
    return replace(then, outputs=list(parts.values()))


def _joined(first: CompletionOutput, then: CompletionOutput) -> CompletionOutput:
    logprobs = then.logprobs
    if first.logprobs is not None and logprobs is not None:
        logprobs = [*first.logprobs, *logprobs]
    return replace(
        then,
        text=first.text + then.text,
        token_ids=[*first.token_ids, *then.token_ids],
        logprobs=logprobs,
    )


@dataclass(slots=True)
class BeamSearchSequence:
    """One sequence that a beam search found."""

    tokens: list[int]
    """Prompt and generated tokens; unlike vLLM's, with the end-of-sequence token."""
    cum_logprob: float = 0.0
    """Sum over the generated tokens."""
    text: str | None = None
    """Of all tokens; None without a tokenizer."""
    score: float = 0.0
    """What sequences are ranked by: cum_logprob / num_generated ** length_penalty."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """The chosen token's, at each generated position."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The `beam_width` best sequences of a prompt, best first."""

    sequences: list[BeamSearchSequence]
