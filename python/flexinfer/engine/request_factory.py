"""RequestFactory: from what a caller asks for to a request that can be served, or a refusal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from flexinfer.engine.beam_search import BeamSearch, check_length_penalty
from flexinfer.engine.parallel_sampling import ParallelSampling
from flexinfer.errors import RequestError
from flexinfer.lora.adapters import salt_of
from flexinfer.outputs import RequestMetrics
from flexinfer.runtime.numbers import whole
from flexinfer.sampling.params import BeamSearchParams, SamplingParams
from flexinfer.sampling.token_filter import with_bad_words_token_ids
from flexinfer.scheduler.request import Request

if TYPE_CHECKING:
    from flexinfer.engine.build import EngineParts
    from flexinfer.engine.group import RequestGroup
    from flexinfer.engine.inputs import ParsedPrompt
    from flexinfer.engine.stream_pace import StreamPace
    from flexinfer.lora.adapters import Adapter
    from flexinfer.types import Prompt


class RequestFactory:
    """Checks each request before any work, against the engine that would serve it."""

    def __init__(self, parts: EngineParts, pace: StreamPace) -> None:
        self._parts = parts
        self._pace = pace
        self._limits = parts.scheduler.config

    def make(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams,
        priority: int,
        adapter: Adapter | None = None,
    ) -> RequestGroup:
        """Raises RequestError if it cannot be served."""
        priority = self._check_priority(priority)
        parsed = self._parts.inputs.parse(prompt)
        try:
            params = params.clone()  # the caller may change its own while the request runs
        except ValueError as error:
            raise RequestError(str(error)) from None
        if isinstance(params, SamplingParams):
            params = with_bad_words_token_ids(params, self._parts.tokenizer)
        self._check_params(params)
        max_model_len = self._limits.max_model_len
        max_tokens = max_model_len if params.max_tokens is None else params.max_tokens
        leader = Request(
            request_id=request_id,
            prompt_token_ids=parsed.token_ids,
            params=params if isinstance(params, SamplingParams) else SamplingParams(),
            max_num_tokens=min(max_model_len, len(parsed.token_ids) + max_tokens),
            metrics=RequestMetrics(arrival_time=time.monotonic()),
            eos_token_ids=self._parts.loaded.eos_token_ids,
            priority=priority,
            cache_salt=salt_of(parsed.cache_salt, adapter),
            adapter=0 if adapter is None else adapter.number,
        )
        self._check_memory(leader)
        group = self._make_group(leader, parsed, params)
        group.lora_request = None if adapter is None else adapter.request
        return group

    def _make_group(
        self, leader: Request, parsed: ParsedPrompt, params: SamplingParams | BeamSearchParams
    ) -> RequestGroup:
        tokenizer = self._parts.tokenizer
        if isinstance(params, BeamSearchParams):
            if parsed.output_token_ids:
                raise RequestError("output_token_ids do not go with beam search")
            check_length_penalty(params.length_penalty, leader.max_num_tokens - leader.num_tokens)
            return BeamSearch(leader, parsed.text, params, tokenizer)
        group = ParallelSampling(leader, parsed.text, tokenizer, self._pace)
        if parsed.output_token_ids:
            if leader.params.structured_outputs is not None:
                self._parts.grammars.check(
                    leader.params.structured_outputs, parsed.output_token_ids
                )
            group.resume(parsed.output_token_ids)
        return group

    def _check_params(self, params: SamplingParams | BeamSearchParams) -> None:
        max_num_seqs = self._limits.max_num_seqs
        if isinstance(params, BeamSearchParams):
            if params.beam_width > max_num_seqs:
                raise RequestError(
                    f"beam_width is {params.beam_width}, but max_num_seqs is {max_num_seqs}: "
                    "all beams of a prompt run at the same time"
                )
            return
        if params.num_samples > max_num_seqs:
            name = "n" if params.best_of is None else "best_of"
            raise RequestError(
                f"{name} is {params.num_samples}, but max_num_seqs is {max_num_seqs}: "
                "all samples of a prompt are forked from it at the same time"
            )
        if params.structured_outputs is not None:
            self._parts.grammars.compile(params.structured_outputs)  # or find what AsyncLLM has
        if params.stop_strings and self._parts.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this engine has none")
        self._check_vocabulary("logit_bias", params.logit_bias or ())
        self._check_vocabulary("stop_token_ids", params.stop_ids)
        self._check_vocabulary("allowed_token_ids", params.allowed_token_ids or ())
        for word in params.bad_words_token_ids or ():
            self._check_vocabulary("bad_words", word)

    def _check_vocabulary(self, name: str, token_ids: Any) -> None:
        vocab_size = self._parts.loaded.vocab_size
        for token_id in token_ids:
            if token_id >= vocab_size:
                raise RequestError(
                    f"{name} names token {token_id}, but the vocabulary has {vocab_size}"
                )

    def _check_priority(self, given: Any) -> int:
        try:
            priority = whole("priority", given)
        except ValueError as error:
            raise RequestError(str(error)) from None
        if priority != 0 and self._limits.scheduling_policy == "fcfs":
            raise RequestError(
                f'priority is {priority}, but scheduling_policy "fcfs" has no priorities'
            )
        return priority

    def _check_memory(self, request: Request) -> None:
        """A request that can never fit is refused now, with the numbers."""
        num_tokens = request.max_num_tokens - 1  # the last token needs no KV
        needed = self._parts.scheduler.admission.most_bytes(request)
        budget = self._parts.elastic.budget_bytes
        if needed > budget:
            raise RequestError(
                f"request {request.request_id!r} may need KV memory for {num_tokens} tokens "
                f"({needed} bytes); the budget is {budget} bytes"
            )
