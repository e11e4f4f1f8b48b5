"""Plans of steps are plain values: through pickle they give the same tokens; and nothing leaks."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer import BeamSearchParams, LLMEngine, SamplingParams
from flexinfer.runner.plan import StepPlan, StepResult
from helpers.engine_kit import make_engine, preempt_at_random
from helpers.tiny_models import random_prompts

PARAMS: list[SamplingParams | BeamSearchParams] = [
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(max_tokens=12),
    SamplingParams(max_tokens=9, n=3, top_p=0.9, seed=4),
    SamplingParams(max_tokens=12, repetition_penalty=1.3, frequency_penalty=0.4, seed=1),
    SamplingParams(max_tokens=12, min_tokens=9, stop_token_ids=list(range(50)), seed=2),
    SamplingParams(max_tokens=8, temperature=0, logprobs=2, prompt_logprobs=1),
    BeamSearchParams(beam_width=3, max_tokens=8),
]


class PickledExecutor:
    """Hands the engine's runner each plan through pickle, and back comes its result likewise."""

    def __init__(self, engine: LLMEngine) -> None:
        self._execute = engine.runner.execute
        self.plans: list[StepPlan] = []
        engine.runner.execute = self.execute  # type: ignore[method-assign]

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        copy: StepPlan = pickle.loads(pickle.dumps(plan))
        assert copy == plan
        result: StepResult = pickle.loads(pickle.dumps(self._execute(copy)))
        return result


@pytest.fixture
def engine() -> Iterator[LLMEngine]:
    engine = make_engine(max_num_seqs=8, max_num_batched_tokens=24)
    yield engine
    engine.close()


def submit(engine: LLMEngine) -> None:
    for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add_request(str(i), prompt, params)


PROMPTS = random_prompts((31, 7, 18, 9, 26, 40, 12), seed=5)


def run(engine: LLMEngine, *, preempt: bool = False) -> list[Any]:
    """What each request gave, in order; asked to, the engine preempts at random steps."""
    rng = random.Random(0)
    final = {}
    while engine.has_unfinished_requests():
        if preempt:
            preempt_at_random(engine, rng, 0.4)
        for output in engine.step():
            final[output.request_id] = output
    return [
        (output.prompt_logprobs, [(o.token_ids, o.logprobs) for o in output.outputs])
        for _, output in sorted(final.items())
    ]


def test_a_run_whose_every_plan_goes_through_pickle_says_the_same(engine: LLMEngine) -> None:
    submit(engine)
    plain = run(engine)
    other = make_engine(max_num_seqs=8, max_num_batched_tokens=24)
    executor = PickledExecutor(other)
    submit(other)
    assert run(other) == plain
    assert {plan.num_decodes for plan in executor.plans} >= {0, 4}
    assert any(plan.scored for plan in executor.plans)
    other.close()


def test_preempted_sequences_keep_their_sampling_state(engine: LLMEngine) -> None:
    seeded = [(i, p) for i, p in enumerate(PARAMS) if i != 1]  # that one is numbered as it comes
    for i, params in seeded:
        engine.add_request(str(i), PROMPTS[i], params)
    plain = run(engine)
    engine.reset_prefix_cache()
    for i, params in seeded:
        engine.add_request(str(i), PROMPTS[i], params)
    disturbed = run(engine, preempt=True)
    tokens = [[ids for ids, _ in outputs] for _, outputs in disturbed]
    assert tokens == [[ids for ids, _ in outputs] for _, outputs in plain]


def test_nothing_is_kept_of_sequences_that_have_ended(engine: LLMEngine) -> None:
    known = engine.runner.sampler.sequences
    submit(engine)
    engine.step()
    engine.step()
    assert len(known) > 0
    engine.abort_request(["0", "2", "6"])
    run(engine)
    assert len(known) == 0
    submit(engine)
    for _ in range(6):
        engine.step()
    engine.abort_request([str(i) for i in range(len(PARAMS))])
    assert len(known) == 0


def test_a_failed_step_leaves_no_sampling_state(engine: LLMEngine) -> None:
    def fail(plan: StepPlan) -> StepResult:
        engine.runner.sampler.sequences.add(plan.new_sequences)
        raise ArithmeticError("no step")

    submit(engine)
    engine.step()
    engine.runner.execute = fail  # type: ignore[method-assign]
    while engine.has_unfinished_requests():
        with pytest.raises(ArithmeticError):
            engine.step()
    assert len(engine.runner.sampler.sequences) == 0


def test_plans_are_frozen_and_hold_plain_values_only(engine: LLMEngine) -> None:
    executor = PickledExecutor(engine)
    submit(engine)
    run(engine)
    plan = executor.plans[0]
    with pytest.raises(FrozenInstanceError):
        plan.slots = ()  # type: ignore[misc]
    for plan in executor.plans:
        modules = {type(getattr(plan, f.name)).__module__ for f in fields(plan)}
        assert modules == {"builtins"}
        assert b"torch" not in pickle.dumps(plan)
        assert b"flexinfer.scheduler" not in pickle.dumps(plan)
        assert b"_vtensor" not in pickle.dumps(plan)


def test_requests_hold_nothing_of_torch(engine: LLMEngine) -> None:
    submit(engine)
    for _ in range(4):
        engine.step()
    for request in engine.scheduler.running.values():
        for item in fields(request):
            value = getattr(request, item.name)
            assert not type(value).__module__.startswith("torch"), item.name
