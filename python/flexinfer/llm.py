"""LLM: the offline API. Names and arguments are those of vLLM.

Thread-safety: all of `LLM` may be called from any thread. One thread steps at a time, for the
requests of all: calls of several threads are computed side by side, and a stream holds nobody up
between two outputs. `llm_engine` itself, a stream and a `Conversation` are for one thread at a
time.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from itertools import count
from types import TracebackType
from typing import Any

from flexinfer.conversation import Conversation
from flexinfer.engine.beam_search import beam_search_output
from flexinfer.engine.call_arguments import (
    ManyAdapters,
    Priorities,
    Tokenization,
    check_call_arguments,
    listed_adapters,
    listed_priorities,
)
from flexinfer.engine.inputs import listed_conversations, listed_prompts, read_chat_template
from flexinfer.engine.llm_engine import LLMEngine
from flexinfer.engine.progress import ShowsProgress, with_progress
from flexinfer.engine.running_calls import RunningCalls
from flexinfer.engine.turns import Turns
from flexinfer.engine_args import EngineArgs
from flexinfer.errors import EngineError, ReleasedError, RequestError
from flexinfer.lora.request import LoRARequest
from flexinfer.metrics.reader import Metric, read_metrics
from flexinfer.outputs import BeamSearchOutput, RequestOutput
from flexinfer.runtime.json_options import require_choice
from flexinfer.sampling.params import BeamSearchParams, RequestOutputKind, SamplingParams
from flexinfer.types import Messages, Prompt

logger = logging.getLogger(__name__)

ManyParams = SamplingParams | Sequence[SamplingParams] | None
LOOKED_AT = 256
"""Requests a step, of those that a call waits for, whether another call has ended them."""


class LLM:
    """A model with its KV cache.

    llm = LLM("path/to/model")
    for output in llm.generate(["Hello", "One two"], SamplingParams(temperature=0)):
        print(output.outputs[0].text)
    """

    def __init__(
        self,
        model: Any,
        *,
        trust_remote_code: bool = False,
        chat_template: str | os.PathLike[str] | None = None,
        **settings: Any,
    ) -> None:
        """`chat_template`: Jinja, as text or its file, in place of the tokenizer's; `settings` are
        the fields of `EngineConfig`, or other arguments of vLLM's that ask for nothing else
        (runtime/vllm_names.py). Nothing but a warning comes of `trust_remote_code`: no code of
        a model's repository is run."""
        template = read_chat_template(chat_template)
        self.llm_engine = LLMEngine.from_engine_args(
            EngineArgs(model, trust_remote_code=trust_remote_code, **settings)
        )
        if template is not None:
            try:
                self.llm_engine.inputs.use_chat_template(template)
            except RequestError:
                self.llm_engine.close()
                raise
        self._request_ids = count()
        self._turns = Turns()  # whose turn it is to touch the engine, or the next
        self._calls = RunningCalls()
        self._set_aside: dict[str, list[RequestOutput]] = {}

    @property
    def engine(self) -> LLMEngine:
        return self.llm_engine

    def get_tokenizer(self) -> Any:
        return self.llm_engine.inputs.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Those of a call without: as the model's generation_config.json and
        `override_generation_config` have them, else SamplingParams' own."""
        return self.llm_engine.sampling_defaults.params()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: ManyParams = None,
        *,
        use_tqdm: ShowsProgress = True,
        lora_request: ManyAdapters = None,
        priority: Priorities = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete one or many prompts; outputs are in the order of the prompts.

        `lora_request`: the adapter of all of them, or one for each, None for those without.
        `tokenization_kwargs`: how prompts are tokenized: add_special_tokens; truncation, with
        max_length; truncate_prompt_tokens, -1 for what leaves room for a token; truncation_side.
        A completion that fails has finish_reason "error", the error as its stop_reason, and the
        text that it had until then; a warning tells how many did.
        Raises RequestError, before any work, if any of the prompts cannot be served.
        """
        check_call_arguments({"mm_processor_kwargs": mm_processor_kwargs})
        tokenization, inputs = Tokenization.of(tokenization_kwargs), self.llm_engine.inputs
        many = [tokenization.tokens_of(one, inputs) for one in listed_prompts(prompts)]
        params = self._params_for_each(sampling_params, len(many), RequestOutputKind.FINAL_ONLY)
        return self._complete(many, params, priority, lora_request, use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: ManyAdapters = None,
        use_tqdm: ShowsProgress = True,
        concurrency_limit: int | None = None,
        *,
        priority: Priorities = None,
    ) -> list[BeamSearchOutput]:
        """The most probable continuations of one or many prompts, found side by side, as many at
        once as `max_num_seqs` allows: `concurrency_limit` of vLLM's changes nothing.

        Raises RequestError, before any work, if any of the prompts cannot be served, and
        EngineError if one of them ended with an error.
        """
        if not isinstance(params, BeamSearchParams):
            raise RequestError(
                f"beam_search takes BeamSearchParams, got {type(params).__name__}: beams are not "
                "sampled, so n, best_of and the like have no meaning for them"
            )
        many = listed_prompts(prompts)
        params = params.clone()
        outputs = self._complete(many, [params] * len(many), priority, lora_request, use_tqdm)
        return [beam_search_output(output, params, self.get_tokenizer()) for output in outputs]

    def conversation(
        self,
        history: Messages | Sequence[int] = (),
        *,
        cache_salt: str = "",
        lora_request: LoRARequest | None = None,
    ) -> Conversation:
        """A conversation whose KV stays in memory between its turns, and that can be forked.

        `history`: its messages so far, or its token ids. Raises RequestError without prefix cache.
        """
        return Conversation(self, history, cache_salt, lora_request)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: ManyParams = None,
        *,
        lora_request: ManyAdapters = None,
        priority: Priorities = None,
    ) -> Generator[RequestOutput, None, None]:
        """Complete prompts, yielding what is new of each at each step, as it comes.

        `request_id` counts up in the order of the prompts; the last output of a request has
        `finished`. Nothing is checked or started before the first output is asked for; leaving
        the iterator early aborts what has not finished.
        """
        many = listed_prompts(prompts)
        params = self._params_for_each(sampling_params, len(many), RequestOutputKind.DELTA)
        yield from self._run(self._add_all(many, params, priority, lora_request))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: ManyParams = None,
        use_tqdm: ShowsProgress = True,
        lora_request: ManyAdapters = None,
        priority: Priorities = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Continue one or many conversations, each a list of {"role": ..., "content": ...}.

        A conversation that goes on from an earlier one finds its KV in the prefix cache.
        `chat_template_kwargs`: what the template may ask for, such as {"enable_thinking": False};
        `chat_template_content_format`: as for `InputProcessor.render`.
        `tokenization_kwargs`: as those of `generate`; special tokens are the template's.
        """
        Tokenization.of(tokenization_kwargs).check_of_chat()
        if chat_template_kwargs is not None:
            self.llm_engine.inputs.check_template_kwargs(chat_template_kwargs)
        prompts: list[Prompt] = [
            self.llm_engine.inputs.chat_prompt(
                conversation,
                chat_template,
                chat_template_content_format=chat_template_content_format,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **(chat_template_kwargs or {}),
            )
            for conversation in listed_conversations(messages)
        ]
        return self.generate(
            prompts,
            sampling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )

    def reset_prefix_cache(self) -> int:
        """Forget all recorded prefixes; returns how many tokens they held."""
        with self._turns:
            return self.llm_engine.reset_prefix_cache()

    def sleep(self, level: int = 1, mode: str = "wait") -> int:
        """Give all physical KV memory back to the system, as `LLMEngine.sleep`; returns bytes.

        mode: calls of other threads that wait for their outputs are waited for ("wait"), or get
        what there is, with finish_reason "abort" ("abort", vLLM's default). Calls that begin
        meanwhile or later, and streams under way, raise ValueError until `wake_up`.
        """
        require_choice("mode", mode, ("wait", "abort"))
        if mode == "abort":
            with self._turns:
                for output in self.llm_engine.abort_request(list(self.llm_engine.unfinished_ids())):
                    self._set_aside.setdefault(output.request_id, []).append(output)
        with self._calls.none(), self._turns:
            return self.llm_engine.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Undo `sleep`; returns whether it is undone. tags: vLLM's parts ("weights", "kv_cache",
        "scheduling"), of which "kv_cache" alone is ever away here. Raises OutOfMemoryError, still
        asleep, when memory is short."""
        with self._turns:
            return self.llm_engine.wake_up(tags)

    def get_metrics(self) -> list[Metric]:
        """The engine's numbers, by the names of docs/metrics.md, as `Counter`, `Gauge`, `Histogram`
        or `Vector` of flexinfer.metrics.reader. Needs prometheus_client."""
        try:
            from flexinfer.engine.prometheus_families import engine_families
        except ImportError as error:
            raise ImportError(
                "get_metrics() needs prometheus_client: pip install 'flexinfer[serve]'"
            ) from error
        with self._turns:
            stats = self.llm_engine.stats()
        return read_metrics(engine_families(stats, self.llm_engine.loaded.name))

    def close(self) -> None:
        with self._turns:
            self.llm_engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _params_for_each(
        self, params: ManyParams, num_prompts: int, kind: RequestOutputKind
    ) -> list[SamplingParams]:
        single = self.get_default_sampling_params() if params is None else params
        each = list(single) if isinstance(single, Sequence) else [single] * num_prompts
        if len(each) != num_prompts:
            raise RequestError(f"{num_prompts} prompts but {len(each)} sampling_params")
        for one in each:
            if not isinstance(one, SamplingParams):
                raise RequestError(f"sampling_params must be SamplingParams, got {one!r}")
        return [replace(one, output_kind=kind) for one in each]

    def _add_all(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | BeamSearchParams],
        priority: Priorities,
        lora_request: ManyAdapters,
    ) -> list[str]:
        """Queue all prompts or, if one is refused, none."""
        priorities = listed_priorities(priority, len(prompts))
        adapters = listed_adapters(lora_request, len(prompts))
        added: list[str] = []
        try:
            with self._turns:
                for prompt, one, rank, adapter in zip(
                    prompts, params, priorities, adapters, strict=True
                ):
                    request_id = str(next(self._request_ids))
                    self.llm_engine.add_request(request_id, prompt, one, rank, adapter)
                    added.append(request_id)
        except BaseException:
            self._turns.call(partial(self._leave, frozenset(added), added))
            raise
        return added

    def _complete(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | BeamSearchParams],
        priority: Priorities,
        lora_request: ManyAdapters,
        use_tqdm: ShowsProgress,
    ) -> list[RequestOutput]:
        with self._calls.one():
            added = self._add_all(prompts, params, priority, lora_request)
            return self._final_outputs(added, use_tqdm)

    def _final_outputs(
        self, request_ids: Sequence[str], use_tqdm: ShowsProgress
    ) -> list[RequestOutput]:
        """Run these requests to their ends. REQUIRES: each gives one output."""
        final = {}
        for output in with_progress(self._run(request_ids), len(request_ids), use_tqdm):
            final[output.request_id] = output
        return [final[request_id] for request_id in request_ids]

    def _run(self, request_ids: Sequence[str]) -> Iterator[RequestOutput]:
        """Until these requests have ended; outputs of others are set aside for their turn. Raises
        EngineError, when the rest has ended, if another call has ended some of them."""
        own = frozenset(request_ids)
        pending, num_ended, errors = set(own), 0, []
        num_turns = count(1)
        try:
            while pending:
                with self._turns:
                    outputs = self._take(own) or self._step(own)
                    if next(num_turns) % (1 + len(pending) // LOOKED_AT) == 0:
                        engine = self.llm_engine
                        pending -= pending.difference(engine.unfinished_ids(), self._set_aside)
                for output in outputs:
                    if output.finished:
                        pending.discard(output.request_id)
                        num_ended += 1
                    failed = [one for one in output.outputs if one.finish_reason == "error"]
                    errors += [(output.request_id, one.stop_reason) for one in failed]
                    yield output
            if errors:
                logger.warning(
                    "%d completions have ended with an error, which is their stop_reason; one of "
                    "request %r: %s",
                    len(errors),
                    *errors[0],
                )
            if num_ended < len(request_ids):
                raise EngineError(
                    f"{len(request_ids) - num_ended} of {len(request_ids)} requests were ended by "
                    "another call: aborted there, or part of a step that failed in it"
                )
        finally:
            self._turns.call(partial(self._leave, own, pending))

    def _leave(self, request_ids: Set[str], pending: Iterable[str]) -> None:
        """Nobody waits for these requests any more, of which some are pending."""
        self.llm_engine.abort_request(pending)
        self._take(request_ids)

    def _take(self, request_ids: Set[str]) -> list[RequestOutput]:
        """What was set aside for them."""
        found = [i for i in self._set_aside if i in request_ids]  # few, where prompts are many
        return [output for i in found for output in self._set_aside.pop(i)]

    def _step(self, request_ids: Set[str]) -> list[RequestOutput]:
        """What a step brings them."""
        for output in self.llm_engine.step():
            self._set_aside.setdefault(output.request_id, []).append(output)
        if self.llm_engine.manager.closed:
            raise ReleasedError("the engine was closed before its requests had ended")
        return self._take(request_ids)
