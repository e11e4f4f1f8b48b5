"""A step is scheduled while the one before it is computed: same tokens, and nothing is lost.

The executor computes as late as it may (`FakeStream`), so that whatever frees, fills or reads the
memory of a step in flight too early changes tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer import BeamSearchParams, LLMEngine, SamplingParams
from flexinfer.outputs import RequestOutput
from helpers.engine_kit import GREEDY, check, drain, make_engine, submit
from helpers.fake_stream import FakeStream
from helpers.tiny_models import random_prompts

PROMPTS = random_prompts((31, 7, 18, 9, 26, 40, 12, 5), seed=5)
MIXED: list[SamplingParams | BeamSearchParams] = [
    SamplingParams(temperature=0, max_tokens=30),
    SamplingParams(max_tokens=25, seed=3),
    SamplingParams(max_tokens=9, n=3, top_p=0.9, seed=4),
    SamplingParams(max_tokens=12, repetition_penalty=1.3, seed=1),
    SamplingParams(max_tokens=12, min_tokens=4, stop_token_ids=list(range(90)), seed=2),
    SamplingParams(max_tokens=8, temperature=0, logprobs=2, prompt_logprobs=1),
    BeamSearchParams(beam_width=2, max_tokens=6),
    SamplingParams(max_tokens=1, temperature=0),
]


def open_engine(**settings: Any) -> tuple[LLMEngine, FakeStream]:
    defaults = {"async_scheduling": True, "max_num_seqs": 8, "max_num_batched_tokens": 24}
    engine = make_engine(**{**defaults, **settings})
    return engine, FakeStream(engine)


@pytest.fixture
def engine() -> Iterator[LLMEngine]:
    engine, _ = open_engine()
    yield engine
    engine.close()


def tokens_of(final: dict[str, RequestOutput]) -> dict[str, Any]:
    return {
        name: [(o.token_ids, o.finish_reason, o.stop_reason) for o in output.outputs]
        for name, output in final.items()
    }


def submit_mixed(engine: LLMEngine) -> None:
    for i, (prompt, params) in enumerate(zip(PROMPTS, MIXED, strict=True)):
        engine.add_request(str(i), prompt, params)


def check_idle(engine: LLMEngine) -> None:
    engine.manager.check_integrity()
    assert engine.manager.stats().num_vtensors == 0
    assert len(engine.runner.sampler.sequences) == 0
    assert not engine.scheduler.running


def test_tokens_are_those_of_transformers(engine: LLMEngine) -> None:
    submit(engine, PROMPTS)
    check(drain(engine), PROMPTS)
    check_idle(engine)


def test_two_steps_are_in_flight_and_tokens_are_fed_on_the_device() -> None:
    engine, stream = open_engine()
    submit(engine, PROMPTS[:4])
    drain(engine)
    assert stream.most_queued == 2
    assert sum(len(plan.fed) for plan in stream.plans) > 4 * 8
    engine.close()


@pytest.mark.parametrize("seed", range(3))
def test_every_kind_of_request_says_what_it_says_without(seed: int) -> None:
    plain = make_engine(max_num_seqs=8, max_num_batched_tokens=24, seed=seed)
    submit_mixed(plain)
    expected = tokens_of(drain(plain))
    plain.close()
    engine, stream = open_engine(seed=seed)
    submit_mixed(engine)
    assert tokens_of(drain(engine)) == expected
    assert any(plan.fed for plan in stream.plans)
    check_idle(engine)
    engine.close()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_memory_is_short(mode: str) -> None:
    """Preempted and swapped requests go on with the same tokens."""
    engine, stream = open_engine(
        kv_cache_memory_bytes=40 * 4096,
        preemption_mode=mode,
        swap_space="4MiB" if mode == "swap" else 0,
    )
    submit(engine, PROMPTS)
    final = drain(engine)
    check(final, PROMPTS)
    assert len(final) == len(PROMPTS)
    assert sum(engine.scheduler.preemption.counts.values()) > 0
    assert any(plan.fed for plan in stream.plans)
    check_idle(engine)
    engine.close()


@pytest.mark.parametrize("seed", range(4))
def test_requests_come_go_and_come_again_at_any_step(seed: int) -> None:
    """Aborted ones, ones with the id of one that has just ended, sleeps, changes of the budget."""
    rng = random.Random(seed)
    engine, _ = open_engine(kv_cache_memory_bytes=1 << 20)
    plain = make_engine()
    ends = [run_one(plain, prompt)["0"].outputs[0].token_ids[5] for prompt in PROMPTS]
    params = [SamplingParams(temperature=0, max_tokens=14, stop_token_ids=[end]) for end in ends]
    expected = [tokens_of(run_one(plain, *each))["0"] for each in zip(PROMPTS, params, strict=True)]
    plain.close()
    waiting = list(range(len(PROMPTS))) * 3
    rng.shuffle(waiting)
    names: dict[str, int] = {}
    while waiting or engine.has_unfinished_requests():
        free = [name for name in "abcdef" if name not in names]
        if waiting and free:
            names[free[0]] = waiting.pop()
            engine.add_request(free[0], PROMPTS[names[free[0]]], params[names[free[0]]])
        chance = rng.random()
        if chance < 0.1 and names:
            gone = rng.choice(list(names))
            assert [o.outputs[0].finish_reason for o in engine.abort_request(gone)] == ["abort"]
            waiting.append(names.pop(gone))
        elif chance < 0.2:
            engine.set_kv_cache_memory(rng.choice([80, 160, 1024]) << 10)
        elif chance < 0.25:
            engine.sleep()
            engine.wake_up()
        for output in engine.step():
            if output.finished and output.request_id in names:
                assert tokens_of({"0": output})["0"] == expected[names.pop(output.request_id)]
        engine.manager.check_integrity()
    assert not names
    check_idle(engine)
    engine.close()


def run_one(
    engine: LLMEngine, prompt: list[int], params: SamplingParams = GREEDY
) -> dict[str, RequestOutput]:
    submit(engine, [prompt], params)
    return drain(engine)


def test_a_finished_requests_memory_is_free_only_when_its_step_has_landed(
    engine: LLMEngine,
) -> None:
    stops = run_one(engine, PROMPTS[0])["0"].outputs[0].token_ids[3]
    engine.add_request("0", PROMPTS[0], SamplingParams(temperature=0, stop_token_ids=[stops]))
    outputs: list[RequestOutput] = []
    while not any(output.finished for output in outputs):
        outputs = engine.step()
    assert engine.manager.stats().num_vtensors == 1
    assert engine.has_unfinished_requests()
    assert engine.step() == []
    check_idle(engine)
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("k", range(1, 14, 3))
def test_a_step_that_fails_is_computed_again(k: int) -> None:
    """The k-th forward fails once: nobody notices."""
    engine, _ = open_engine()
    forward, count = engine.runner.forward, 0

    def failing(inputs: Any) -> Any:
        nonlocal count
        count += 1
        if count == k:
            raise RuntimeError("a kernel failed")
        return forward(inputs)

    engine.runner.forward = failing  # type: ignore[method-assign]
    submit(engine, PROMPTS)
    final = drain(engine)
    check(final, PROMPTS)
    assert {output.outputs[0].finish_reason for output in final.values()} == {"length"}
    check_idle(engine)
    engine.close()


def test_closing_with_a_step_in_flight_frees_all() -> None:
    engine, _ = open_engine()
    submit(engine, PROMPTS)
    for _ in range(4):
        engine.step()
    engine.close()


def test_on_a_cpu_it_is_off_by_default() -> None:
    engine = make_engine()
    assert engine.config.async_scheduling is False
    engine.close()
