"""What is only proposed ends no request: a row that fails behind a token is a rejection, and a step
that fails with a proposal is computed again without one."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("llguidance")

from flexinfer import LLM, LLMEngine, SamplingParams
from flexinfer.cli.settings import SHIPPED_MODEL
from flexinfer.outputs import CompletionOutput
from flexinfer.runner.model_runner import ModelRunner
from flexinfer.sampling.grammars import StructuredOutputsParams
from flexinfer.speculation.ngram import NgramIndex
from flexinfer.speculation.step_costs import StepCosts
from helpers.engine_kit import drain, make_engine, submit
from helpers.tiny_models import make_model, random_prompts

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 2,
}
POISON = 127
PROMPTS = [[token % POISON for token in prompt] for prompt in random_prompts((20, 33, 7))]
BAD = PROMPTS[0]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logit_bias={POISON: -100.0})


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


def poisoned(name: str) -> Any:
    """A model that computes NaN with one token, and with all that attend to it."""
    model = copy.deepcopy(make_model(name))
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = float("inf")
    return model


def said(engine: LLMEngine, prompts: list[list[int]]) -> list[CompletionOutput]:
    submit(engine, prompts, GREEDY)
    final = drain(engine)
    return [final[str(i)].outputs[0] for i in range(len(prompts))]


def propose(patch: pytest.MonkeyPatch, known: list[list[int]], token: int) -> None:
    """What will come, and for the first prompt this token."""

    def look_up(_: NgramIndex, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        if token_ids[: len(BAD)] == BAD:
            return [token] * num_tokens
        coming = (all_ids[len(token_ids) :] for all_ids in known if all_ids[:7] == token_ids[:7])
        return next(coming)[:num_tokens]

    patch.setattr(NgramIndex, "propose", look_up)


@pytest.mark.parametrize("backend", ["auto", "sdpa"])
@pytest.mark.parametrize(
    ("name", "kv_cache_dtype"),
    [("llama", "auto"), ("llama", "int8"), ("llama", "fp8_e4m3"), ("mistral", "auto")],
)
def test_a_proposed_token_whose_kv_is_nan_ends_no_request(
    name: str, kv_cache_dtype: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is proposed once; what is recorded after that is sound: the second turn shares it."""
    settings = {"kv_cache_dtype": kv_cache_dtype, "attention_backend": backend}
    turns = [PROMPTS]
    engine = make_engine(poisoned(name), enable_prefix_caching=False, **settings)
    plain = [said(engine, PROMPTS)]
    turns.append([p + o.token_ids + [5, 6] for p, o in zip(PROMPTS, plain[0], strict=True)])
    plain.append(said(engine, turns[1]))
    engine.close()
    known = [p + o.token_ids for p, o in zip(turns[1], plain[1], strict=True)]
    propose(monkeypatch, known, POISON)
    engine = make_engine(poisoned(name), speculative_config=NGRAM, **settings)
    for num_turns, (prompts, expected) in enumerate(zip(turns, plain, strict=True), 1):
        assert said(engine, prompts) == expected
        stats = engine.stats().speculation
        assert stats is not None
        assert stats.num_draft_tokens - stats.num_accepted_tokens == 4 * num_turns
    assert engine.manager.stats().prefix_hit_tokens > 60
    engine.close()


def fails_in_forward(patch: pytest.MonkeyPatch, is_guilty: bool) -> None:
    """The model fails with the token, and, if guilty, with all that comes after that."""
    real, failed = ModelRunner.forward, []

    def fail(self: ModelRunner, inputs: Any) -> torch.Tensor:
        if POISON in inputs.token_ids.tolist() or (failed and is_guilty):
            failed.append(inputs)
            raise ArithmeticError("cannot be computed")
        return real(self, inputs)

    patch.setattr(ModelRunner, "forward", fail)


@pytest.mark.parametrize("num_requests", [1, 3])
def test_a_request_with_which_the_model_fails_is_computed_without_its_proposal(
    num_requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = PROMPTS[:num_requests]
    engine = make_engine()
    plain = said(engine, prompts)
    engine.close()
    propose(monkeypatch, [p + o.token_ids for p, o in zip(prompts, plain, strict=True)], POISON)
    fails_in_forward(monkeypatch, is_guilty=False)
    engine = make_engine(speculative_config=NGRAM)
    assert said(engine, prompts) == plain
    stats = engine.stats().speculation
    assert stats is not None
    assert stats.num_draft_tokens - stats.num_accepted_tokens == 4
    engine.close()


def test_one_that_fails_without_its_proposal_too_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    propose(monkeypatch, [], POISON)
    fails_in_forward(monkeypatch, is_guilty=True)
    engine = make_engine(speculative_config=NGRAM)
    submit(engine, [BAD], GREEDY)
    with pytest.raises(ArithmeticError, match="cannot be computed"):
        drain(engine)
    assert not engine.has_unfinished_requests()
    engine.reset_prefix_cache()
    assert engine.manager.stats().num_vtensors == 0
    engine.close()
