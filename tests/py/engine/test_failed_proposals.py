"""What is only proposed ends no request: a row that fails behind a token is a rejection, and a step
that fails with a proposal is computed again without one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("llguidance")

from flexinfer import LLM, SamplingParams
from flexinfer.cli.settings import SHIPPED_MODEL
from flexinfer.outputs import CompletionOutput
from flexinfer.sampling.grammars import StructuredOutputsParams
from flexinfer.speculation.step_costs import StepCosts

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 2,
}


@pytest.fixture(autouse=True)
def it_always_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepCosts, "estimate", lambda _, num, further: [1.0] * (further + 1))


@pytest.fixture(scope="module")
def llms() -> Iterator[list[LLM]]:
    """Without speculation, and with it."""
    found = [
        LLM(str(SHIPPED_MODEL), kv_cache_memory_bytes="16MiB", speculative_config=config)
        for config in (None, NGRAM)
    ]
    yield found
    for llm in found:
        llm.close()


def ids(llm: LLM, letters: str) -> list[int]:
    found: list[int] = llm.llm_engine.tokenizer.convert_tokens_to_ids(list(letters))
    return found


def answer(llm: LLM, prompt: list[int], params: SamplingParams) -> CompletionOutput:
    outputs = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return outputs[0].outputs[0]


def end(output: CompletionOutput) -> tuple[Any, ...]:
    return output.text, output.token_ids, output.finish_reason, output.stop_reason


@pytest.mark.parametrize(("stop", "reason"), [(["X"], "stop"), (None, "error")])
def test_a_row_that_fails_behind_an_accepted_token_is_a_rejection(
    llms: list[LLM], stop: list[str] | None, reason: str
) -> None:
    """Of "abcX" each may be followed by the next one alone, and X by none."""
    letters = ids(llms[0], "abcX")
    orders = set(product(letters, letters)) - set(pairwise(letters))
    params = SamplingParams(
        temperature=0,
        max_tokens=12,
        allowed_token_ids=letters,
        bad_words_token_ids=[list(order) for order in sorted(orders)],
        stop=stop,
    )
    plain, speculated = (answer(llm, letters * 4, params) for llm in llms)
    assert end(speculated) == end(plain)
    assert plain.finish_reason == reason
    assert plain.token_ids[-1] == letters[-1]


def test_a_grammar_at_a_loss_behind_a_proposed_token_ends_no_request(llms: list[LLM]) -> None:
    """The prompt shows "[{", of which what may follow is too complex; the answer is "[1]"."""
    words = {f"word{i}": {"type": "string"} for i in range(700)}
    big = {"type": "object", "properties": words, "additionalProperties": False}
    item = {"anyOf": [{"enum": [1, 2]}, big]}
    schema = {"type": "array", "prefixItems": [item], "minItems": 1, "maxItems": 1}
    bracket, brace = ids(llms[0], "[{")
    params = SamplingParams(
        temperature=0,
        max_tokens=12,
        logit_bias={brace: -100.0},
        structured_outputs=StructuredOutputsParams(json=schema, whitespace_pattern=""),
    )
    plain, speculated = (answer(llm, [bracket, brace] * 4, params) for llm in llms)
    assert end(speculated) == end(plain)
    assert plain.finish_reason == "stop"
    stats = llms[1].llm_engine.stats().speculation
    assert stats is not None
    assert stats.num_draft_tokens > stats.num_accepted_tokens
