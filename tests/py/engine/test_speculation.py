"""Speculation changes no token: what is drawn is what would have been drawn without it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer import LLM, LLMEngine, SamplingParams
from flexinfer.cli.settings import SHIPPED_MODEL
from flexinfer.outputs import RequestOutput
from flexinfer.runner.model_runner import ModelRunner
from flexinfer.sampling.grammars import StructuredOutputsParams
from flexinfer.sampling.params import BeamSearchParams
from flexinfer.speculation.ngram import NgramIndex
from flexinfer.speculation.step_costs import StepCosts
from helpers.engine_kit import TOKEN_BYTES, drain, make_engine, submit
from helpers.tiny_models import random_prompts, reference

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2}
PROMPTS = random_prompts((20, 33, 7, 41))
NUM_NEW = 24


class Oracle:
    """In place of the look-up: what will come, with a mistake here and there."""

    def __init__(self, patch: pytest.MonkeyPatch, mistakes: float = 0.2) -> None:
        self.known: list[list[int]] = []
        self._mistakes = mistakes
        self._rng = random.Random(0)
        patch.setattr(NgramIndex, "propose", lambda _, tokens, num: self.propose(tokens, num))
        patch.setattr(StepCosts, "estimate", lambda _, num, further: [1.0] * (further + 1))

    def learn(self, prompts: list[list[int]], final: dict[str, RequestOutput]) -> None:
        for i, prompt in enumerate(prompts):
            self.known.append(prompt + final[str(i)].outputs[0].token_ids)

    def propose(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        for known in self.known:
            if known[: len(token_ids)] == list(token_ids):
                coming = known[len(token_ids) :][:num_tokens]
                return [t ^ (self._rng.random() < self._mistakes) for t in coming]
        return []


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    return Oracle(monkeypatch)


def run(
    params: SamplingParams, prompts: list[list[int]] = PROMPTS, **settings: Any
) -> tuple[dict[str, RequestOutput], LLMEngine]:
    engine = make_engine(**settings)
    submit(engine, prompts, params)
    final = drain(engine)
    engine.reset_prefix_cache()
    assert engine.manager.stats().num_vtensors == 0
    engine.close()
    return final, engine


def both(
    oracle: Oracle, params: SamplingParams, prompts: list[list[int]] = PROMPTS, **settings: Any
) -> tuple[dict[str, RequestOutput], dict[str, RequestOutput], LLMEngine]:
    """Without speculation and with it."""
    plain, _ = run(params, prompts)
    oracle.learn(prompts, plain)
    final, engine = run(params, prompts, speculative_config=NGRAM, **settings)
    return plain, final, engine


def ends(final: dict[str, RequestOutput]) -> dict[str, Any]:
    outputs = {i: output.outputs[0] for i, output in final.items()}
    return {i: (o.token_ids, o.finish_reason, o.stop_reason, o.text) for i, o in outputs.items()}


def accepted(engine: LLMEngine) -> int:
    assert engine._speculation is not None
    return engine._speculation.stats.num_accepted_tokens


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 7},
        {"preemption_mode": "swap", "swap_space": "1MiB", "kv_cache_memory_bytes": 130},
        {"preemption_mode": "recompute", "kv_cache_memory_bytes": 130},
        {"layers_per_plane": 1, "enable_prefix_caching": False},
    ],
)
def test_greedy_tokens_are_those_of_transformers(oracle: Oracle, settings: dict[str, Any]) -> None:
    if "kv_cache_memory_bytes" in settings:
        settings |= {"kv_cache_memory_bytes": 130 * TOKEN_BYTES, "max_model_len": 90}
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW)
    oracle.known = [p + reference("llama", tuple(p), NUM_NEW) for p in PROMPTS]
    final, engine = run(params, speculative_config=NGRAM, **settings)
    assert [PROMPTS[int(i)] + final[i].outputs[0].token_ids for i in "0123"] == oracle.known
    assert accepted(engine) > 10
    if "preemption_mode" in settings:
        assert sum(
            engine.scheduler.preemption.counts_by_mode()[settings["preemption_mode"]].values()
        )


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "logprobs": 3},
        {"temperature": 0.0, "presence_penalty": 1.0, "frequency_penalty": 0.5, "logprobs": 0},
        {"temperature": 0.8, "repetition_penalty": 1.3, "min_tokens": 9},
        {"temperature": 1.0, "logit_bias": {3: 4.0}, "prompt_logprobs": 1},
    ],
)
def test_a_seed_gives_the_same_tokens_with_speculation_and_without(
    oracle: Oracle, params: dict[str, Any]
) -> None:
    plain, final, engine = both(
        oracle, SamplingParams(seed=5, max_tokens=NUM_NEW, ignore_eos=True, **params)
    )
    assert ends(final) == ends(plain)
    for i, output in plain.items():
        for rows in zip(
            output.outputs[0].logprobs or [], final[i].outputs[0].logprobs or [], strict=True
        ):
            ours, theirs = (sorted((t, p.logprob) for t, p in row.items()) for row in rows)
            assert [t for t, _ in ours] == [t for t, _ in theirs]
            assert [p for _, p in ours] == pytest.approx([p for _, p in theirs], abs=1e-4)
    assert accepted(engine) > 10


@pytest.mark.parametrize("place", [0, 5, 6, 7, 8])
def test_a_stop_token_within_an_accepted_run_ends_the_request_there(
    oracle: Oracle, place: int
) -> None:
    plain, _ = run(SamplingParams(temperature=0, max_tokens=NUM_NEW))
    oracle.learn(PROMPTS, plain)
    stop = plain["1"].outputs[0].token_ids[place]
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, stop_token_ids=[stop])
    expected, _ = run(params)
    assert expected["1"].outputs[0].finish_reason == "stop"
    final, engine = run(params, speculative_config=NGRAM)
    assert ends(final) == ends(expected)
    assert engine._requests.generation_tokens == sum(
        len(output.outputs[0].token_ids) for output in expected.values()
    )


def test_what_is_recorded_are_accepted_tokens_alone(oracle: Oracle) -> None:
    prompts = random_prompts((20,))
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW)
    plain, _ = run(params, prompts)
    oracle.learn(prompts, plain)
    engine = make_engine(speculative_config=NGRAM)
    submit(engine, prompts, params)
    tokens = prompts[0] + drain(engine)["0"].outputs[0].token_ids
    assert engine.manager.match_prefix(tokens) == len(tokens) - 1
    longer = [*tokens, *random_prompts((6,), seed=9)[0]]
    submit(engine, [longer], params)
    final = drain(engine)["0"]
    assert final.num_cached_tokens == len(tokens) - 1
    assert final.outputs[0].token_ids == reference("llama", tuple(longer), NUM_NEW)
    engine.close()


def test_rejection_moves_no_chunk_and_copies_none(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NgramIndex, "propose", lambda *_: [1, 2, 3, 4])  # nothing of it comes
    engine = make_engine(speculative_config=NGRAM, chunk_bytes=4096, enable_pre_extend=False)
    submit(engine, PROMPTS, SamplingParams(temperature=0, max_tokens=NUM_NEW))
    while engine.has_unfinished_requests():
        engine.step()
        for request in engine.scheduler.running.values():
            assert request.vtensor is not None
            assert request.vtensor.num_tokens == request.num_computed_tokens
    stats = engine.manager.stats()
    assert engine._speculation is not None
    assert engine._speculation.stats.num_draft_tokens > 4 * NUM_NEW
    assert stats.chunks_copied == 0
    assert stats.driver_calls["unmap"].calls == 0
    engine.close()


@pytest.mark.parametrize("preemption_mode", ["off", "recompute"])
def test_rows_of_rejected_proposals_are_there_for_others(
    preemption_mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are of 4 tokens, and there are 8. Two hold 6 and 1, and the second one needs another
    before it ends. What was rejected has given the first one the eighth, which it does not need."""
    monkeypatch.setattr(StepCosts, "estimate", lambda _, num, further: [1.0] * (further + 1))
    prompts = random_prompts((21, 3))

    def wrong_for_the_first(_: NgramIndex, tokens: Sequence[int], num: int) -> list[int]:
        return [1] * num if tokens[:21] == prompts[0] else []

    monkeypatch.setattr(NgramIndex, "propose", wrong_for_the_first)
    engine = make_engine(
        speculative_config=NGRAM,
        preemption_mode=preemption_mode,
        kv_cache_memory_bytes=8 * 4 * TOKEN_BYTES,
        max_model_len=32,
        enable_pre_extend=False,
    )
    for i, max_tokens in enumerate((10, 4)):
        engine.add_request(str(i), prompts[i], SamplingParams(temperature=0, max_tokens=max_tokens))
    final = drain(engine)
    assert [final[i].outputs[0].finish_reason for i in "01"] == ["length", "length"]
    assert not any(engine.scheduler.preemption.counts.values())
    assert engine._speculation is not None
    assert engine._speculation.stats.num_draft_tokens > 0
    engine.close()


def test_several_samples_and_beams_are_not_speculated(oracle: Oracle) -> None:
    oracle.known = [p + reference("llama", tuple(p), NUM_NEW) for p in PROMPTS]
    engine = make_engine(speculative_config=NGRAM)
    engine.add_request("n", PROMPTS[0], SamplingParams(n=3, temperature=0, max_tokens=NUM_NEW))
    final = drain(engine)["n"]
    engine.add_request("beams", PROMPTS[1], BeamSearchParams(beam_width=2, max_tokens=8))
    drain(engine)
    assert [PROMPTS[0] + o.token_ids for o in final.outputs] == [oracle.known[0]] * 3
    assert engine._speculation is not None
    assert engine._speculation.stats.num_drafts == 0
    engine.close()


def test_a_row_that_fails_among_speculated_ones_ends_alone(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW)
    plain, _ = run(params)
    oracle.learn(PROMPTS, plain)
    engine = make_engine(speculative_config=NGRAM)
    real = ModelRunner.forward

    def fail(self: ModelRunner, inputs: Any) -> torch.Tensor:
        logits = real(self, inputs)
        group = engine._groups.get("2")
        slot = group.leader.vtensor.slot if group and group.leader.vtensor else -1
        if any(s.slot == slot and s.end > 15 for s in inputs.metadata.segments):
            raise ArithmeticError("cannot be computed")
        return logits

    monkeypatch.setattr(ModelRunner, "forward", fail)
    submit(engine, PROMPTS, params)
    final = drain(engine)
    assert final.pop("2").outputs[0].finish_reason == "error"
    del plain["2"]
    assert ends(final) == ends(plain)
    engine.close()


CHAT = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 3, "stop": ["e", "zq"], "min_tokens": 12},
    {"temperature": 0, "structured_outputs": StructuredOutputsParams(json_object=True)},
    {"seed": 1, "structured_outputs": StructuredOutputsParams(regex="[a-c]{3}(abc){2,9} end")},
]


@pytest.mark.parametrize("params", CHAT, ids=["greedy", "stop strings", "json", "regex"])
@pytest.mark.parametrize("mistakes", [0.0, 0.3])
def test_text_is_the_same(
    params: dict[str, Any], mistakes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    oracle = Oracle(monkeypatch, mistakes)
    prompts = [[5, 6, 7, 8, 9], list(range(30, 50))]
    sampling = SamplingParams(max_tokens=40, **params)
    found = []
    for config in (None, NGRAM):
        with LLM(
            str(SHIPPED_MODEL), kv_cache_memory_bytes="16MiB", speculative_config=config
        ) as llm:
            outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling)
            found.append(ends({str(i): output for i, output in enumerate(outputs)}))
            if config is None:
                oracle.known = [
                    p + o.outputs[0].token_ids for p, o in zip(prompts, outputs, strict=True)
                ]
            else:
                assert accepted(llm.llm_engine) > 0
    assert found[0] == found[1]


def test_what_looks_up_is_the_sequence_itself() -> None:
    """No oracle: a model that repeats its prompt's loop is speculated, and gives the same."""
    prompt = [7, 8, 9, 10, 11] * 12
    params = SamplingParams(temperature=0, max_tokens=40)
    config = NGRAM | {"prompt_lookup_min": 1}
    plain, _ = run(params, [prompt])
    final, engine = run(params, [prompt], speculative_config=config)
    assert ends(final) == ends(plain)
    assert engine._speculation is not None
    assert engine._speculation.stats.num_drafts > 0
