"""Generation: from a job, that is checked prompts and params, to outputs of the engine."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from flexinfer.errors import EngineError
from flexinfer.lora.adapters import Adapter
from flexinfer.outputs import BeamSearchOutput, RequestOutput
from flexinfer.runtime.panics import panics_as_errors
from flexinfer.sampling.grammars import TOO_COMPLEX
from flexinfer.sampling.params import (
    NO_TOKEN_LEFT,
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
)
from flexinfer.server.http.errors import APIError, bad_request, shutting_down
from flexinfer.server.observability.logs import log_with_request
from flexinfer.server.protocol.base import CompletionTokensDetails, PromptTokensDetails, Usage
from flexinfer.server.protocol.sampling import SamplingFields
from flexinfer.server.state import ServerState
from flexinfer.types import TokensPrompt

Outputs = AsyncGenerator[tuple[int, RequestOutput], None]
"""Index of the prompt, and what came of it."""
Result = TypeVar("Result")
MAX_JOINED = 64
"""Outputs of several prompts that wait for one reader."""


@dataclass(frozen=True)
class Job:
    """What one HTTP request asks of the engine."""

    request_id: str
    tenant: str
    prompts: Sequence[TokensPrompt]
    params: SamplingParams | BeamSearchParams
    priority: int = 0
    adapter: Adapter | None = None

    @property
    def num_sequences(self) -> int:
        params = self.params
        each = params.beam_width if isinstance(params, BeamSearchParams) else params.num_samples
        return each * len(self.prompts)

    @property
    def engine_ids(self) -> list[str]:
        """For the engine's requests, one per prompt."""
        if len(self.prompts) == 1:
            return [self.request_id]
        return [f"{self.request_id}-{prompt_idx}" for prompt_idx in range(len(self.prompts))]


async def stream(state: ServerState, job: Job) -> Outputs:
    """Outputs as they come, with what is new in each. Raises APIError, EngineError."""
    with _admit(state, job) as ids:
        params = _sampling(job, RequestOutputKind.DELTA)
        parts = [_outputs(state, job, params, idx, name) for idx, name in enumerate(ids)]
        async with aclosing(_join(parts) if len(parts) > 1 else parts[0]) as outputs:
            async for item in outputs:
                yield item


async def generate_final(state: ServerState, job: Job) -> list[RequestOutput]:
    """The final output of each prompt. Raises APIError, EngineError."""
    with _admit(state, job) as ids:
        params = _sampling(job, RequestOutputKind.FINAL_ONLY)

        async def final(prompt_idx: int, engine_id: str) -> RequestOutput:
            async with aclosing(_outputs(state, job, params, prompt_idx, engine_id)) as outputs:
                return [output async for _, output in outputs][-1]

        return await _all([final(idx, name) for idx, name in enumerate(ids)])


async def beam_search(state: ServerState, job: Job) -> list[BeamSearchOutput]:
    """The found sequences of each prompt. Raises APIError, EngineError."""
    params = job.params
    assert isinstance(params, BeamSearchParams)
    with _admit(state, job) as ids:
        return await _all([_beams(state, job, params, idx, name) for idx, name in enumerate(ids)])


def usage_of(outputs: Sequence[RequestOutput], num_reasoning: int | None = None) -> Usage:
    """Tokens of final outputs, one for each prompt."""
    return make_usage(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(len(one.token_ids) for output in outputs for one in output.outputs),
        sum(output.num_cached_tokens or 0 for output in outputs),
        num_reasoning,
    )


def log_usage(usage: Usage) -> None:
    """Tokens of the request that is being answered, for its line in the log."""
    details = {"prompt_tokens_details", "completion_tokens_details"}
    log_with_request(**usage.model_dump(exclude=details))


def make_usage(
    num_prompt: int, num_completion: int, num_cached: int, num_reasoning: int | None = None
) -> Usage:
    """`num_reasoning`: None where it is not known."""
    details = None
    if num_reasoning is not None:
        details = CompletionTokensDetails(reasoning_tokens=num_reasoning)
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_completion,
        total_tokens=num_prompt + num_completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached),
        completion_tokens_details=details,
    )


def _sampling(job: Job, kind: RequestOutputKind) -> SamplingParams:
    assert isinstance(job.params, SamplingParams)
    try:
        return replace(job.params, output_kind=kind)
    except ValueError as error:  # best_of has no deltas
        raise bad_request(str(error), "stream") from None


@contextmanager
def _admit(state: ServerState, job: Job) -> Iterator[list[str]]:
    """The engine's ids of a job, which is counted meanwhile. Raises APIError for too many."""
    with (
        state.limits.hold(job.tenant, job.num_sequences),
        state.claim_ids(job.engine_ids) as ids,
    ):
        try:
            yield ids
        except (APIError, EngineError):
            if state.is_ending:
                raise shutting_down() from None
            raise


async def _outputs(
    state: ServerState, job: Job, params: SamplingParams, prompt_idx: int, engine_id: str
) -> Outputs:
    """Raises APIError for a sequence that the engine ended by a failure."""
    grammar, structure = None, params.structured_outputs
    if structure is not None:
        grammar = await state.grammar(job.tenant, structure)
    outputs = state.llm.generate(
        job.prompts[prompt_idx],
        params,
        engine_id,
        lora_request=job.adapter,
        priority=job.priority,
    )
    if state.tracer is not None:
        outputs = state.tracer.watch(outputs, engine_id, params)
    async with _prefilled(state, job, prompt_idx, engine_id), aclosing(outputs):
        async for output in outputs:
            _check(output)
            yield prompt_idx, output
    del grammar  # until here the engine found it compiled


async def _beams(
    state: ServerState, job: Job, params: BeamSearchParams, prompt_idx: int, engine_id: str
) -> BeamSearchOutput:
    async with _prefilled(state, job, prompt_idx, engine_id):
        search = state.llm.beam_search(
            job.prompts[prompt_idx],
            params,
            engine_id,
            lora_request=job.adapter,
            priority=job.priority,
        )
        if state.tracer is not None:
            return await state.tracer.watch_beams(search, engine_id, params)
        return await search


def _prefilled(
    state: ServerState, job: Job, prompt_idx: int, engine_id: str
) -> AbstractAsyncContextManager[None]:
    """Within it the prompt's KV is there, if another server computes it for this one."""
    params = job.params
    is_scored = isinstance(params, SamplingParams) and params.prompt_logprobs is not None
    # An adapter may not be loaded there; prompts to be scored are computed where that is done.
    if state.partner is None or job.adapter is not None or is_scored:
        return nullcontext()
    return state.partner.prefilled(job.prompts[prompt_idx], engine_id)


def _check(output: RequestOutput) -> None:
    for completion in output.outputs:
        if completion.finish_reason == "error" and TOO_COMPLEX in str(completion.stop_reason):
            raise bad_request(str(completion.stop_reason), "structured_outputs")
        if completion.finish_reason == "error" and completion.stop_reason == NO_TOKEN_LEFT:
            raise bad_request(NO_TOKEN_LEFT)
        if completion.finish_reason == "error":
            raise APIError(
                500, f"the request failed: {completion.stop_reason}", code="engine_error"
            )
        if completion.finish_reason == "abort":
            raise APIError(503, "the request was ended by the server", code="aborted")


async def _join(parts: Sequence[Outputs]) -> Outputs:
    """Items of several generators in the order in which they come."""
    queue: asyncio.Queue[tuple[int, RequestOutput] | BaseException | None]
    queue = asyncio.Queue(MAX_JOINED)

    async def pump(part: Outputs) -> None:
        try:
            with panics_as_errors:
                async with aclosing(part):
                    async for item in part:
                        await queue.put(item)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.ensure_future(pump(part)) for part in parts]
    try:
        num_open = len(tasks)
        while num_open:
            got = await queue.get()
            if isinstance(got, BaseException):
                raise got
            if got is None:
                num_open -= 1
            else:
                yield got
    finally:
        await _end(tasks)


async def _all(work: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Results of all coroutines; when one fails the others are cancelled."""
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _end(tasks)


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def tells_usage(state: ServerState, fields: SamplingFields) -> bool:
    """Whether a stream does."""
    return fields.wants_usage or state.settings.enable_force_include_usage


class UsageCounter:
    """Tokens of a stream, added up from its deltas."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}  # number of tokens, of cached ones
        self._completions: Counter[tuple[int, int]] = Counter()
        """By prompt and choice."""

    def add(self, prompt_idx: int, output: RequestOutput) -> None:
        self._prompts[prompt_idx] = (len(output.prompt_token_ids), output.num_cached_tokens or 0)
        for one in output.outputs:
            self._completions[prompt_idx, one.index] += len(one.token_ids)

    def usage(self, num_reasoning: int | None = None) -> Usage:
        """Of all choices."""
        return make_usage(
            sum(num_tokens for num_tokens, _ in self._prompts.values()),
            self._completions.total(),
            sum(num_cached for _, num_cached in self._prompts.values()),
            num_reasoning,
        )

    def running(self, prompt_idx: int, choice_idx: int, *, is_begun: bool = True) -> Usage:
        """What a chunk says: tokens of its own choice and prompt alone, as vLLM's do. `is_begun`:
        False before the first of them is told."""
        num_tokens, num_cached = self._prompts[prompt_idx]
        num_completion = self._completions[prompt_idx, choice_idx] if is_begun else 0
        return make_usage(num_tokens, num_completion, num_cached)
