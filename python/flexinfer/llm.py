"""LLM: the offline API. Names and arguments are those of vLLM. Not thread-safe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from types import TracebackType
from typing import Any

from flexinfer.config import DEFAULT_MAX_NUM_SEQS, EngineConfig
from flexinfer.engine import LLMEngine
from flexinfer.errors import RequestError, UnsupportedModelError
from flexinfer.inputs import is_single_prompt
from flexinfer.outputs import RequestOutput
from flexinfer.sampling_params import RequestOutputKind, SamplingParams
from flexinfer.types import Conversation, Prompt

ManyParams = SamplingParams | Sequence[SamplingParams] | None


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
        tokenizer: Any = None,
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        dtype: Any = "auto",
        device: str | None = None,
        seed: int = 0,
        max_model_len: int | None = None,
        max_num_seqs: int = DEFAULT_MAX_NUM_SEQS,
        max_num_batched_tokens: int | None = None,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        wait_for_shared_prefix: bool = True,
        kv_cache_memory_bytes: int | str | None = None,
        chunk_bytes: int | str | None = None,
        layers_per_plane: int | None = None,
        attention_backend: str = "sdpa",
    ) -> None:
        """Arguments as in `EngineConfig`; `trust_remote_code` exists to be refused."""
        if trust_remote_code:
            raise UnsupportedModelError(
                "trust_remote_code is refused: FlexInfer runs no code from model repositories"
            )
        self.llm_engine = LLMEngine(
            EngineConfig(
                model=model,
                tokenizer=tokenizer,
                skip_tokenizer_init=skip_tokenizer_init,
                dtype=dtype,
                device=device,
                seed=seed,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                enable_prefix_caching=enable_prefix_caching,
                enable_chunked_prefill=enable_chunked_prefill,
                wait_for_shared_prefix=wait_for_shared_prefix,
                kv_cache_memory_bytes=kv_cache_memory_bytes,
                chunk_bytes=chunk_bytes,
                layers_per_plane=layers_per_plane,
                attention_backend=attention_backend,
            )
        )
        self._request_ids = count()
        self._set_aside: dict[str, list[RequestOutput]] = {}

    @property
    def engine(self) -> LLMEngine:
        return self.llm_engine

    def get_tokenizer(self) -> Any:
        return self.llm_engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: ManyParams = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete one or many prompts; outputs are in the order of the prompts.

        Raises RequestError, before any work, if any of the prompts can not be served.
        """
        request_ids = self._add_all(
            prompts, sampling_params, RequestOutputKind.FINAL_ONLY, priority
        )
        final = {}
        for output in self._progress(self._run(request_ids), len(request_ids), use_tqdm):
            final[output.request_id] = output
        return [final[request_id] for request_id in request_ids]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: ManyParams = None,
        *,
        priority: Sequence[int] | None = None,
    ) -> Iterator[RequestOutput]:
        """Complete prompts, yielding what is new of each at each step, as it comes.

        `request_id` counts up in the order of the prompts; the last output of a request has
        `finished`. Nothing is checked or started before the first output is asked for; leaving
        the iterator early aborts what has not finished.
        """
        yield from self._run(
            self._add_all(prompts, sampling_params, RequestOutputKind.DELTA, priority)
        )

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: ManyParams = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Continue one or many conversations, each a list of {"role": ..., "content": ...}.

        A conversation that goes on from an earlier one finds its KV in the prefix cache.
        """
        prompts: list[Prompt] = [
            {
                "prompt_token_ids": self.llm_engine.inputs.apply_chat_template(
                    conversation,
                    chat_template,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tools=tools,
                )
            }
            for conversation in _conversations(messages)
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def reset_prefix_cache(self) -> int:
        """Forget all recorded prefixes; returns how many tokens they held."""
        return self.llm_engine.manager.reset_prefix_cache()

    def close(self) -> None:
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

    def _add_all(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: ManyParams,
        kind: RequestOutputKind,
        priority: Sequence[int] | None,
    ) -> list[str]:
        """Queue all prompts or, if one is refused, none."""
        many: Any = [prompts] if is_single_prompt(prompts) else prompts
        params = _params_for_each(sampling_params, len(many))
        priorities = [0] * len(many) if priority is None else list(priority)
        if len(priorities) != len(many):
            raise RequestError(f"{len(many)} prompts but {len(priorities)} priorities")
        added: list[str] = []
        try:
            for prompt, one, rank in zip(many, params, priorities, strict=True):
                request_id = str(next(self._request_ids))
                self.llm_engine.add_request(
                    request_id, prompt, replace(one, output_kind=kind), rank
                )
                added.append(request_id)
        except BaseException:
            self.llm_engine.abort_request(added)
            raise
        return added

    def _run(self, request_ids: Sequence[str]) -> Iterator[RequestOutput]:
        """Step until these requests have ended; outputs of others are set aside for their turn."""
        pending = set(request_ids)
        try:
            while pending:
                for request_id in request_ids:
                    for output in self._set_aside.pop(request_id, ()):
                        pending -= {output.request_id} if output.finished else set()
                        yield output
                if pending:
                    for output in self.llm_engine.step():
                        self._set_aside.setdefault(output.request_id, []).append(output)
        finally:
            self.llm_engine.abort_request(pending)
            for request_id in request_ids:
                self._set_aside.pop(request_id, None)

    def _progress(
        self, outputs: Iterator[RequestOutput], total: int, use_tqdm: bool
    ) -> Iterator[RequestOutput]:
        if not use_tqdm:
            return outputs
        from tqdm.auto import tqdm

        bar: Iterator[RequestOutput] = tqdm(outputs, total=total, desc="Processed prompts")
        return bar


def _params_for_each(params: ManyParams, num_prompts: int) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * num_prompts
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if len(params) != num_prompts:
        raise RequestError(f"{num_prompts} prompts but {len(params)} sampling_params")
    return list(params)


def _conversations(messages: Any) -> list[Conversation]:
    """One conversation (a sequence of messages) or several -> several."""
    if not messages:
        raise RequestError("the conversation is empty")
    return [messages] if isinstance(messages[0], dict) else list(messages)
