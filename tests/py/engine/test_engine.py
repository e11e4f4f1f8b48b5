"""The step loop: requests by hand, abort, failure of the model, memory afterwards."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer import LLMEngine, RequestError, RequestOutputKind, SamplingParams
from helpers import engine_kit
from helpers.idle_manager import available_bytes
from helpers.tiny_models import random_prompts, reference

GREEDY = SamplingParams(temperature=0, max_tokens=12)


def make_engine(**settings: Any) -> LLMEngine:
    return engine_kit.make_engine(**{"kv_cache_memory_bytes": 16 << 20, **settings})


@pytest.fixture
def engine() -> Iterator[LLMEngine]:
    engine = make_engine()
    yield engine
    engine.manager.check_integrity()
    engine.close()


def run(engine: LLMEngine) -> dict[str, Any]:
    final = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            final[output.request_id] = output
    return final


def test_requests_may_join_at_any_step(engine: LLMEngine) -> None:
    prompts = random_prompts((20, 3, 33, 8, 1, 50))
    final = {}
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, GREEDY)
        for output in engine.step() + engine.step():
            final[output.request_id] = output
    final.update(run(engine))
    for i, prompt in enumerate(prompts):
        assert final[str(i)].outputs[0].token_ids == reference("llama", tuple(prompt), 12)


@pytest.mark.parametrize(
    ("kind", "lengths"),
    [
        (RequestOutputKind.CUMULATIVE, [1, 2, 3]),
        (RequestOutputKind.DELTA, [1, 1, 1]),
        (RequestOutputKind.FINAL_ONLY, [3]),
    ],
)
def test_output_kind_says_what_is_given(
    engine: LLMEngine, kind: RequestOutputKind, lengths: list[int]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, output_kind=kind)
    engine.add_request("a", [1, 2, 3], params)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    assert outputs[-1].finished


def test_priority_decides_who_waits(engine: LLMEngine) -> None:
    for i in range(6):
        engine.add_request(str(i), [1, 2, i], GREEDY, priority=-i)
    first = {output.request_id for output in engine.step()}
    assert first == {"5", "4", "3", "2"}
    run(engine)


@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_abort_gives_back_all_memory(num_steps: int) -> None:
    engine = make_engine(enable_prefix_caching=False)
    before = available_bytes(engine.manager)
    for i, prompt in enumerate(random_prompts((20, 30, 40, 9, 9, 9))):
        engine.add_request(str(i), prompt, GREEDY)
    for _ in range(num_steps):
        engine.step()
    outputs = engine.abort_request([*"012345", "unknown"])
    assert {output.outputs[0].finish_reason for output in outputs} == {"abort"}
    assert not engine.has_unfinished_requests()
    assert available_bytes(engine.manager) == before
    engine.manager.check_integrity()
    engine.close()


@pytest.mark.parametrize("failing_layer", [0, 3])
def test_a_failing_model_ends_its_requests_and_nothing_else(failing_layer: int) -> None:
    engine = make_engine(max_num_seqs=2, enable_prefix_caching=False)
    before = available_bytes(engine.manager)
    prompts = random_prompts((20, 30, 25))
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, GREEDY)
    engine.step()
    forward = engine.runner.backend.forward

    def broken(layer_idx: int, *arguments: Any) -> Any:
        if layer_idx == failing_layer:
            raise RuntimeError("the device is gone")
        return forward(layer_idx, *arguments)

    engine.runner.backend.forward = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.step()
    engine.manager.check_integrity()
    assert engine.get_num_unfinished_requests() == 1
    assert available_bytes(engine.manager) == before
    engine.runner.backend.forward = forward  # type: ignore[method-assign]
    final = run(engine)
    assert final["2"].outputs[0].token_ids == reference("llama", tuple(prompts[2]), 12)
    engine.close()


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(engine: LLMEngine) -> None:
    engine.manager.memory_budget = 64 << 10
    with pytest.raises(RequestError, match=r"KV memory for 111 tokens .*budget is 65536 bytes"):
        engine.add_request("a", [1] * 100, GREEDY)
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("used", [1], GREEDY), "'used' is in use"),
        (("b", [1], GREEDY, "high"), "priority must be an integer, got 'high'"),
        (("b", [1], SamplingParams(logit_bias={500: 1.0})), "logit_bias names token 500"),
    ],
)
def test_bad_request_is_refused(engine: LLMEngine, arguments: Any, message: str) -> None:
    engine.add_request("used", [1, 2], GREEDY)
    with pytest.raises(RequestError, match=message):
        engine.add_request(*arguments)
    run(engine)


def test_preempted_requests_go_on_where_they_were() -> None:
    engine = make_engine(kv_cache_memory_bytes=80 * 2048, max_model_len=60)
    prompts = random_prompts((20, 30, 25, 28))
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=24))
    final = run(engine)
    assert sum(output.metrics.num_preemptions for output in final.values()) > 0
    for i, prompt in enumerate(prompts):
        assert final[str(i)].outputs[0].token_ids == reference("llama", tuple(prompt), 24)
    engine.manager.check_integrity()
    engine.close()


def test_the_worker_is_told_when_steps_begin_and_when_they_are_over(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []
    monkeypatch.setattr(engine.manager, "set_busy", told.append)
    for i, prompt in enumerate(random_prompts((5, 9))):
        engine.add_request(str(i), prompt, GREEDY)
    run(engine)
    assert told == [True, False]
    engine.add_request("2", [1, 2, 3], GREEDY)
    engine.step()
    engine.abort_request("2")
    assert told == [True, False] * 2


def test_importing_the_package_loads_no_torch() -> None:
    code = "import flexinfer, sys; assert 'torch' not in sys.modules; print(flexinfer.__version__)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
