"""All ways of decoding at once, under memory pressure, random preemption and aborts."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer import BeamSearchParams, LLMEngine, SamplingParams, VTensor
from helpers import engine_kit
from helpers.engine_kit import check_nothing_is_left
from helpers.tiny_models import random_prompts

NUM_REQUESTS = 14


def make_engine(**settings: Any) -> LLMEngine:
    defaults = {"max_num_seqs": 8, "kv_cache_memory_bytes": 16 << 20, "max_model_len": 100}
    return engine_kit.make_engine(**{**defaults, **settings})


def random_request(rng: random.Random) -> tuple[list[int], SamplingParams | BeamSearchParams]:
    """One of a few prompts, so that prefixes are shared, with params of any kind."""
    prompt = rng.choice(random_prompts((60, 33, 20, 9)))[: rng.choice((9, 20, 60))]
    max_tokens = rng.randint(1, 20)
    kind = rng.randrange(3)
    if kind == 0:
        width = rng.randint(1, 4)
        return prompt, BeamSearchParams(beam_width=width, max_tokens=max_tokens)
    if kind == 1:
        return prompt, SamplingParams(n=rng.randint(1, 5), temperature=0, max_tokens=max_tokens)
    return prompt, SamplingParams(
        n=2, best_of=rng.randint(2, 6), seed=rng.randint(0, 99), max_tokens=max_tokens
    )


def run(engine: LLMEngine, requests: list[Any]) -> list[Any]:
    """One at a time: nothing shares, waits, or is preempted."""
    final = []
    for i, (prompt, params) in enumerate(requests):
        engine.add_request(str(i), prompt, params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
        final.append([completion.token_ids for completion in outputs[0].outputs])
    return final


def check_that_all_memory_returns(engine: LLMEngine) -> None:
    check_nothing_is_left(engine)
    engine.manager.drain()  # the worker may be creating chunks still
    engine.manager.reset_prefix_cache()
    engine.manager.trim()
    assert engine.manager.stats().resident_bytes == 0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "settings",
    [
        {"preemption_mode": "recompute"},
        {"preemption_mode": "swap", "swap_space": "8MiB"},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 16},
        {"layers_per_plane": 1, "kv_cache_memory_bytes": 8 * 30 * 4096},
    ],
)
def test_disturbed_requests_say_what_they_say_alone(settings: dict[str, Any], seed: int) -> None:
    rng = random.Random(seed)
    requests = [random_request(rng) for _ in range(NUM_REQUESTS)]
    quiet = make_engine()
    expected = run(quiet, requests)
    quiet.close()

    engine = make_engine(**{"kv_cache_memory_bytes": 120 << 10, **settings})
    final: dict[str, Any] = {}
    aborted = set()
    waiting = list(enumerate(requests))
    while waiting or engine.has_unfinished_requests():
        while waiting and rng.random() < 0.3:
            i, (prompt, params) = waiting.pop(0)
            engine.add_request(str(i), prompt, params, priority=rng.randrange(3))
        engine_kit.preempt_at_random(engine, rng, 0.15)
        if rng.random() < 0.02:
            request_id = str(rng.randrange(NUM_REQUESTS))
            if engine.abort_request(request_id):
                aborted.add(request_id)
        for output in engine.step():
            final[output.request_id] = output
        engine.manager.check_integrity()
    for i, tokens in enumerate(expected):
        if str(i) not in aborted:
            assert [c.token_ids for c in final[str(i)].outputs] == tokens, requests[i]
    check_that_all_memory_returns(engine)
    engine.close()


@pytest.mark.parametrize("num_forks", [0, 1, 2])
@pytest.mark.parametrize(
    "params",
    [SamplingParams(n=5, max_tokens=9), BeamSearchParams(beam_width=4, max_tokens=9)],
    ids=["samples", "beams"],
)
def test_a_fork_that_fails_ends_the_whole_group_and_no_step(
    params: Any, num_forks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork, num_left = VTensor.fork, num_forks

    def broken(self: VTensor) -> VTensor:
        nonlocal num_left
        num_left -= 1
        return fork(self) if num_left >= 0 else 1 / 0

    monkeypatch.setattr(VTensor, "fork", broken)
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], params)
    (output,) = engine.step()
    assert {completion.finish_reason for completion in output.outputs} == {"error"}
    assert "ZeroDivisionError" in str(output.outputs[0].stop_reason)
    check_that_all_memory_returns(engine)
    engine.close()
