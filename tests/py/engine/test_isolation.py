"""One request never ends another's: a failure at any stage of its sampling is its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil, log2
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flexinfer import LLMEngine, RequestError, SamplingParams
from flexinfer.engine.output_builder import OutputBuilder
from flexinfer.outputs import RequestOutput
from flexinfer.runner import model_runner
from flexinfer.runner.inputs import StepInputs
from flexinfer.runner.model_runner import ModelRunner
from flexinfer.runner.plan import StepPlan, StepResult
from flexinfer.sampling import sampler as sampler_module
from flexinfer.sampling.sampler import Sampler
from helpers.engine_kit import make_engine
from helpers.tiny_models import random_prompts

NUM_INNOCENT = 20
BAD_SEED = 666
BAD_LOGPROBS = 7
PROMPTS = random_prompts(tuple(range(5, 26)), seed=2)
BAD = SamplingParams(seed=BAD_SEED, logprobs=BAD_LOGPROBS, max_tokens=6, presence_penalty=0.1)


def innocent(index: int) -> SamplingParams:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"seed": index},
        {"seed": index, "top_k": 9, "logprobs": 2},
        {"seed": index, "top_p": 0.8, "repetition_penalty": 1.2},
        {"temperature": 0, "logit_bias": {3: 2.0}, "logprobs": 1},
    ]
    return SamplingParams(max_tokens=6, **kinds[index % len(kinds)])


def segment_tokens(plan: StepPlan) -> list[Any]:
    """The tokens of each segment."""
    lengths = [end - start for start, end in zip(plan.starts, plan.ends, strict=True)]
    return np.split(np.frombuffer(plan.token_ids, np.int32), np.cumsum(lengths)[:-1])


@pytest.fixture
def engine() -> Iterator[LLMEngine]:
    engine = make_engine(max_num_seqs=24)
    yield engine
    engine.close()


def run(engine: LLMEngine, bad: SamplingParams | None) -> dict[str, RequestOutput]:
    """The last output of each request; all of them are in one batch."""
    for i in range(NUM_INNOCENT):
        engine.add_request(str(i), PROMPTS[i], innocent(i))
        if bad is not None and i == 9:
            engine.add_request("bad", PROMPTS[NUM_INNOCENT], bad)
    final = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            final[output.request_id] = output
    engine.reset_prefix_cache()
    assert len(engine.runner.sampler.sequences) == 0
    assert engine.manager.stats().num_vtensors == 0
    return final


def tokens(final: dict[str, RequestOutput]) -> dict[str, list[int]]:
    """Parts of a step are rounded otherwise than the whole: log probabilities may differ a bit."""
    return {i: output.outputs[0].token_ids for i, output in final.items()}


def fails_for_states(patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """`owner.name(..., states)` fails if the bad sequence is among the states."""
    real = getattr(owner, name)

    def stage(*arguments: Any) -> Any:
        if any(state.params.seed == BAD_SEED for state in arguments[-1]):
            raise IndexError("out of the vocabulary")
        return real(*arguments)

    patch.setattr(owner, name, stage)


def fails_in_logprobs(patch: pytest.MonkeyPatch) -> None:
    real = sampler_module.gather_logprobs

    def stage(logits: Any, token_ids: Any, asked: list[int | None]) -> Any:
        if BAD_LOGPROBS in asked:
            raise IndexError("out of the vocabulary")
        return real(logits, token_ids, asked)

    patch.setattr(sampler_module, "gather_logprobs", stage)


def fails_in_builder(patch: pytest.MonkeyPatch, name: str, after: int) -> None:
    """`OutputBuilder.name` fails for the bad request, from its token number `after` on."""
    real = getattr(OutputBuilder, name)

    def stage(self: OutputBuilder, *arguments: Any) -> Any:
        if self.request.request_id == "bad" and self.request.num_output_tokens >= after:
            raise IndexError("out of the vocabulary")
        return real(self, *arguments)

    patch.setattr(OutputBuilder, name, stage)


def fails_in_forward(patch: pytest.MonkeyPatch, after: int) -> None:
    """The model fails for each batch that has the bad prompt's slot, from its row `after` on."""
    real = ModelRunner.forward
    bad = PROMPTS[NUM_INNOCENT]

    def stage(self: ModelRunner, inputs: Any) -> torch.Tensor:
        logits = real(self, inputs)  # all KV of the attempt is written
        for segment in inputs.metadata.segments:
            tokens = inputs.token_ids[segment.row : segment.row + segment.num_tokens]
            if segment.start == 0 and tokens.tolist() == bad:
                slots.add(segment.slot)
            if segment.slot in slots and segment.end >= len(bad) + after:
                raise IndexError("out of the vocabulary")
        return logits

    slots: set[int] = set()
    patch.setattr(ModelRunner, "forward", stage)


STAGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "bias": lambda patch: fails_for_states(patch, sampler_module, "apply_bias"),
    "penalties": lambda patch: fails_for_states(patch, sampler_module, "apply_penalties"),
    "structure": lambda patch: fails_for_states(patch, Sampler, "_forbid"),
    "draw": lambda patch: fails_for_states(patch, sampler_module, "choose"),
    "logprobs": fails_in_logprobs,
    "detokeniser": lambda patch: fails_in_builder(patch, "update", 1),
    "detokeniser, at the end": lambda patch: fails_in_builder(patch, "update", 6),
    "output": lambda patch: fails_in_builder(patch, "build", 1),
    "output, later": lambda patch: fails_in_builder(patch, "build", 4),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_row_that_fails_among_twenty_ends_alone(
    engine: LLMEngine, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run(engine, None)
    STAGES[stage](monkeypatch)
    final = run(engine, BAD)
    failed = final.pop("bad").outputs[0]
    assert failed.finish_reason == "error"
    assert "out of the vocabulary" in str(failed.stop_reason)
    assert {i: o.outputs for i, o in final.items()} == {i: o.outputs for i, o in plain.items()}


@pytest.mark.parametrize("num_decodes", [0, 3])
def test_a_row_with_which_the_model_fails_among_twenty_ends_alone(
    engine: LLMEngine, num_decodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run(engine, None)
    fails_in_forward(monkeypatch, num_decodes)
    final = run(engine, BAD)
    failed = final.pop("bad").outputs[0]
    assert (failed.finish_reason, len(failed.token_ids)) == ("error", num_decodes)
    assert failed.stop_reason == "IndexError: out of the vocabulary"
    assert tokens(final) == tokens(plain)


@pytest.mark.parametrize("guilty", [{3}, {0, 1}, {7, 19}, set(range(19)), set(range(1, 20))])
def test_all_rows_that_fail_are_found_each_row_computed_at_most_log_n_times_more(
    engine: LLMEngine, guilty: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run(engine, None)
    prompts = [PROMPTS[i] for i in guilty]
    real = ModelRunner.execute
    num_rows: list[int] = []

    def fail(self: ModelRunner, plan: StepPlan) -> StepResult:
        num_rows.append(len(plan.slots))
        rows = [token_ids.tolist() for token_ids in segment_tokens(plan)]
        if any(prompt in rows for prompt in prompts):
            raise ArithmeticError("cannot be computed")
        return real(self, plan)

    monkeypatch.setattr(ModelRunner, "execute", fail)
    final = run(engine, None)
    failed = {int(i) for i, o in final.items() if o.outputs[0].finish_reason == "error"}
    assert failed == guilty
    assert all("cannot be" in str(final[str(i)].outputs[0].stop_reason) for i in guilty)
    innocents = {i: ids for i, ids in tokens(plain).items() if int(i) not in guilty}
    assert {i: ids for i, ids in tokens(final).items() if int(i) not in guilty} == innocents
    num_decoded = 5 * len(innocents)
    assert sum(num_rows) - num_decoded <= NUM_INNOCENT * (2 + ceil(log2(NUM_INNOCENT)))


def test_a_failure_that_passes_ends_nobody(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run(engine, None)
    real = ModelRunner.forward
    calls: list[object] = []

    def fail_once(self: ModelRunner, inputs: StepInputs) -> torch.Tensor:
        logits = real(self, inputs)
        calls.append(inputs)
        if len(calls) == 3:
            raise ArithmeticError("a bit has flipped")
        return logits

    monkeypatch.setattr(ModelRunner, "forward", fail_once)
    assert tokens(run(engine, None)) == tokens(plain)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_end_their_request_with_an_error_that_says_so(
    engine: LLMEngine, temperature: float, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run(engine, None)
    real = ModelRunner.sample

    def poisoned(self: ModelRunner, logits: torch.Tensor, plan: Any) -> Any:
        for row, sampling_id in enumerate(plan.sampling_ids):
            if self.sampler.sequences[sampling_id].params.logprobs == BAD_LOGPROBS:
                logits = logits.clone()
                logits[row, 5] = value
        return real(self, logits, plan)

    monkeypatch.setattr(ModelRunner, "sample", poisoned)
    bad = SamplingParams(temperature=temperature, logprobs=BAD_LOGPROBS)
    final = run(engine, bad)
    failed = final.pop("bad").outputs[0]
    assert (failed.finish_reason, failed.token_ids) == ("error", [])
    assert failed.stop_reason == "the model computed logits that are NaN or infinite"
    assert {i: o.outputs for i, o in final.items()} == {i: o.outputs for i, o in plain.items()}


def test_what_leaves_no_finite_logit_ends_its_own_request(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run(engine, None)
    monkeypatch.setattr(SamplingParams, "clone", lambda self: self)  # else checked once more
    hopeless = SamplingParams(temperature=0)
    object.__setattr__(hopeless, "repetition_penalty", 1e-300)  # refused, if said before
    final = run(engine, hopeless)
    failed = final.pop("bad").outputs[0]
    assert failed.finish_reason == "error"
    assert failed.stop_reason == "the sampling parameters leave no token that could be chosen"
    assert {i: o.outputs for i, o in final.items()} == {i: o.outputs for i, o in plain.items()}


def test_scores_of_a_prompt_that_cannot_be_told_end_their_own_request(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run(engine, None)

    def fail(*arguments: Any) -> Any:
        raise IndexError("out of the vocabulary")

    monkeypatch.setattr(model_runner, "score_tokens", fail)
    final = run(engine, SamplingParams(prompt_logprobs=1, temperature=0))
    failed = final.pop("bad").outputs[0]
    assert failed.finish_reason == "error"
    assert {i: o.outputs for i, o in final.items()} == {i: o.outputs for i, o in plain.items()}


def test_one_sample_that_fails_leaves_the_others_of_its_request(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(n=3, seed=BAD_SEED - 1, max_tokens=6)  # sample 1 has the bad seed
    plain = run(engine, params)["bad"]
    STAGES["draw"](monkeypatch)
    final = run(engine, params)["bad"]
    assert [o.finish_reason for o in final.outputs] == ["length", "error", "length"]
    assert [final.outputs[i] for i in (0, 2)] == [plain.outputs[i] for i in (0, 2)]


def test_a_failed_leader_leaves_the_samples_that_were_to_be_forked_from_it(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(n=3, seed=BAD_SEED, max_tokens=6)
    plain = run(engine, params)["bad"]
    STAGES["draw"](monkeypatch)
    final = run(engine, params)["bad"]
    assert [o.finish_reason for o in final.outputs] == ["error", "length", "length"]
    assert final.outputs[1:] == plain.outputs[1:]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stop_token_ids": [128]}, "stop_token_ids names token 128, but the vocabulary has 128"),
        ({"stop_token_ids": [2**70], "min_tokens": 2}, "stop_token_ids names token 11805916"),
        ({"logit_bias": {2**70: 1.0}}, "logit_bias names token 11805916"),
    ],
)
def test_ids_beyond_the_vocabulary_are_refused(
    engine: LLMEngine, settings: dict[str, Any], message: str
) -> None:
    assert engine.loaded.vocab_size == 128
    with pytest.raises(RequestError, match=message):
        engine.add_request("bad", [1, 2, 3], SamplingParams(**settings))
    with pytest.raises(RequestError, match="is not in"):
        engine.add_request("bad", [1, 2**70], SamplingParams())


def test_end_tokens_that_the_vocabulary_lacks_are_no_failure(engine: LLMEngine) -> None:
    object.__setattr__(engine.loaded, "eos_token_ids", frozenset({5, 5000}))
    final = run(engine, SamplingParams(min_tokens=3, max_tokens=4, temperature=0))
    assert final["bad"].outputs[0].finish_reason in ("length", "stop")
