"""A real server whose model says what a test wants: families of models differ in their words."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from itertools import pairwise
from typing import Any

import pytest

from flexinfer.async_llm import AsyncLLM
from flexinfer.outputs import CompletionOutput, RequestMetrics, RequestOutput
from flexinfer.sampling.params import RequestOutputKind, SamplingParams


def say(monkeypatch: pytest.MonkeyPatch, llm: AsyncLLM, text: str) -> list[SamplingParams]:
    """From now on every answer is `text`, a token at a time; returns the params asked with."""
    tokenizer: Any = llm.tokenizer
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    # Bytes of a character that is cut into several tokens come with its last one.
    shown = [tokenizer.decode(ids[:end]).rstrip("\ufffd") for end in range(len(ids) + 1)]
    words = [after.removeprefix(before) for before, after in pairwise(shown)]
    assert "".join(words) == text
    asked: list[SamplingParams] = []

    def output(prompt: Any, start: int, end: int, params: SamplingParams) -> RequestOutput:
        is_cut = params.max_tokens is not None and params.max_tokens < len(ids)
        last = params.max_tokens if is_cut else len(ids)
        reason: Any = "length" if is_cut else "stop"
        is_over = end >= (last or 0)
        one = CompletionOutput(
            index=0,
            text="".join(words[start:end]),
            token_ids=ids[start:end],
            finish_reason=reason if is_over else None,
        )
        prompt_ids = prompt["prompt_token_ids"]
        return RequestOutput("", None, prompt_ids, [one], is_over, RequestMetrics(0.0), 3)

    async def generate(
        prompt: Any, params: SamplingParams, *_: Any, **__: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        asked.append(params)
        end = min(len(ids), params.max_tokens or len(ids))
        if params.output_kind is RequestOutputKind.FINAL_ONLY:
            yield output(prompt, 0, end, params)
            return
        for idx in range(end):
            yield output(prompt, idx, idx + 1, params)

    monkeypatch.setattr(llm, "generate", generate)
    return asked


def check_admitted(llm: AsyncLLM, text: str, asked: list[SamplingParams]) -> None:
    """Real sampling would have allowed these words."""
    ids = llm.tokenizer(text, add_special_tokens=False).input_ids
    ended = [*ids, llm.tokenizer.eos_token_id]
    assert asked
    for params in asked:
        if params.structured_outputs is not None:
            matcher = llm.grammars.matcher(params.structured_outputs)
            for num_read, token in enumerate(ended):
                assert matcher.allowed(ended[:num_read])[token]
