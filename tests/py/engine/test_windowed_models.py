"""Models with sliding windows give back what these have left, and say what transformers say."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer import LLMEngine, SamplingParams
from flexinfer.replay.reader import TraceReader
from flexinfer.vtensor import manager as vtensor_manager
from flexinfer.vtensor.settings import driver_config
from helpers import engine_kit
from helpers.engine_kit import drain, submit
from helpers.tiny_models import (
    CONFIGS,
    continue_prompt,
    draw_model,
    random_prompts,
    reference,
)

NUM_NEW = 30
WINDOW = 16
LENGTHS = (100, 60, 130, 33, 81)


def make_engine(name: str, **settings: Any) -> LLMEngine:
    defaults = {"kv_cache_memory_bytes": 8 << 20, "max_num_batched_tokens": 32}
    return engine_kit.make_engine(name, **{**defaults, **settings})


def check(name: str, final: dict[str, Any], prompts: list[list[int]]) -> None:
    for i, prompt in enumerate(prompts):
        assert final[str(i)].outputs[0].token_ids == reference(name, tuple(prompt), NUM_NEW)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3", "gpt_oss"])
def test_tokens_are_those_of_transformers_whatever_happens(name: str, seed: int) -> None:
    rng = random.Random(f"{name} {seed}")
    engine = make_engine(
        name,
        preemption_mode=rng.choice(["recompute", "swap"]),
        swap_space="8MiB",
        max_num_batched_tokens=rng.choice([7, 32, 128]),
        enable_prefix_caching=seed > 0,
        chunk_bytes=rng.choice([4096, 8192, 65536]),
        layers_per_plane=rng.choice([None, 1]),
    )
    prompts = random_prompts(LENGTHS, seed=seed)
    prompts[2][:90] = prompts[0][:90]
    prompts[4] = [*prompts[1], *prompts[4]][:81]
    submit(engine, prompts, SamplingParams(temperature=0, max_tokens=NUM_NEW))
    final = drain(engine, rng)
    check(name, final, prompts)
    engine.close()


@pytest.mark.parametrize(("backend", "chunk_kib"), [("host", 8), ("sdpa", 64)])
def test_room_for_a_layer_that_does_not_exist_changes_no_token(
    backend: str, chunk_kib: int
) -> None:
    """Three layers of gemma2 with a window beside two: a row is shorter with room for a fourth."""
    config = CONFIGS["gemma2"]()
    layer_types = [*config.layer_types, "sliding_attention"]
    config.update({"num_hidden_layers": 5, "layer_types": layer_types})
    model = draw_model(config)
    engine = engine_kit.make_engine(
        model,
        kv_cache_memory_bytes=8 << 20,
        chunk_bytes=chunk_kib << 10,
        attention_backend=backend,
        preemption_mode="swap",
        swap_space="8MiB",
        max_num_batched_tokens=32,
    )
    places = {group.window: group.layers_per_plane for group in engine.manager.spec.groups}
    assert places == {WINDOW: 4, None: 2}
    prompts = random_prompts((100, 60, 130))
    prompts[2][:90] = prompts[0][:90]
    submit(engine, prompts, SamplingParams(temperature=0, max_tokens=NUM_NEW))
    final = drain(engine, random.Random(chunk_kib))
    for i, prompt in enumerate(prompts):
        expected = continue_prompt(model, tuple(prompt), NUM_NEW)
        assert final[str(i)].outputs[0].token_ids == expected
    engine.manager.check_integrity()
    engine.close()


@pytest.mark.parametrize("backend", ["host", "sdpa"])
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss"])
def test_no_kernel_reads_below_a_window(
    name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has been given back faults here: a read of it would end this process."""
    monkeypatch.setattr(
        vtensor_manager, "driver_config", lambda device, _: driver_config(device, "guard")
    )
    engine = make_engine(name, attention_backend=backend)
    prompts = random_prompts(LENGTHS)
    submit(engine, prompts, SamplingParams(temperature=0, max_tokens=NUM_NEW))
    check(name, drain(engine), prompts)
    assert engine.manager.stats().chunks_given_back > 0
    engine.close()


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_the_steps_thread_calls_no_driver_while_windows_move(name: str, tmp_path: Path) -> None:
    """Decodes whose every row falls due many times: the worker maps ahead of them and unmaps."""
    engine = make_engine(name, enable_prefix_caching=False)
    submit(engine, random_prompts((40, 25, 33)), SamplingParams(temperature=0, max_tokens=120))
    for step in range(100):
        if step == 30:  # all prompts are computed, and how far ahead to map is learned
            engine.manager.start_trace(tmp_path / "steps.trace")
        engine.step()
        engine.manager.drain()  # the time that a larger model's step would leave the worker
    engine.manager.stop_trace()
    calls = [r for _, r in TraceReader(tmp_path / "steps.trace") if r["k"] == "call"]
    assert {"map", "unmap"} <= {call["call"] for call in calls}
    assert [call for call in calls if not call.get("worker")] == []
    engine.close()


def test_long_requests_hold_no_more_than_their_windows() -> None:
    """Two layers of gemma2 have a window of 16, two keep all: what each step leaves is bounded."""
    engine = make_engine("gemma2", enable_prefix_caching=False, max_num_batched_tokens=8)
    manager = engine.manager
    assert manager.spec.windows == (WINDOW,)
    prompts = random_prompts((200,))
    submit(engine, prompts, SamplingParams(temperature=0, max_tokens=NUM_NEW))
    while engine.has_unfinished_requests():
        outputs = engine.step()
        manager.drain()
        for request in engine.scheduler.running.values():
            assert request.vtensor is not None
            length = request.num_computed_tokens
            rows_ahead = 2 * manager.spec.row_chunks * manager.chunk_bytes
            held = manager.bytes_for(length + 8) + rows_ahead
            assert request.vtensor.info().mapped_bytes <= held
    assert outputs[0].outputs[0].token_ids == reference("gemma2", tuple(prompts[0]), NUM_NEW)
    assert manager.stats().chunks_given_back > 0
    engine.close()


def test_a_request_beyond_the_budget_of_full_layers_fits_with_windows() -> None:
    """Four layers of mistral with a window: 230 tokens in what 80 would take without one."""
    token_bytes = 4 * 2 * 2 * 16 * 4
    engine = make_engine(
        "mistral", kv_cache_memory_bytes=80 * token_bytes, max_num_batched_tokens=16
    )
    prompts = random_prompts((200,))
    submit(engine, prompts, SamplingParams(temperature=0, max_tokens=NUM_NEW))
    check("mistral", drain(engine), prompts)
    engine.close()


def test_a_prompt_beyond_what_windows_allow_is_refused_before_any_work() -> None:
    """Two layers of gemma2 keep all: they bound a request, whatever the windows give back."""
    settings = {"kv_cache_memory_bytes": 120 << 10, "max_num_batched_tokens": 16}
    with pytest.raises(ValueError, match=r"holds one request of \d+ tokens; 256 tokens need"):
        make_engine("gemma2", max_model_len=256, **settings)
    engine = make_engine("gemma2", **settings)
    longest = engine.max_model_len
    assert longest < 256
    with pytest.raises(ValueError, match=f"{longest} tokens, but max_model_len is {longest}"):
        engine.add_request("0", [1] * longest, SamplingParams(max_tokens=1))
    engine.set_kv_cache_memory(100 << 10)
    with pytest.raises(ValueError, match=r"'0' may need KV memory for .* the budget is 102400"):
        engine.add_request("0", [1] * (longest - 1), SamplingParams(max_tokens=1))
    assert not engine.has_unfinished_requests()
    assert engine.manager.stats().num_vtensors == 0
    engine.close()


def test_a_conversation_goes_on_at_the_end_of_its_last_turn() -> None:
    engine = make_engine("gemma3")
    prompt = random_prompts((90,))[0]
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW)
    engine.add_request("0", prompt, params)
    first = drain(engine)["0"].outputs[0].token_ids
    again = [*prompt, *first, *random_prompts((10,), seed=5)[0]]
    engine.add_request("1", again, params)
    final = drain(engine)["1"]
    assert final.num_cached_tokens == len(prompt) + NUM_NEW - 1
    assert final.cache_limit == "not recorded"
    assert final.outputs[0].token_ids == reference("gemma3", tuple(again), NUM_NEW)
    engine.add_request("2", [*again[:60], 1, 2], params)  # in the middle of the first prompt
    middle = drain(engine)["2"]
    assert (middle.num_cached_tokens, middle.cache_limit) == (0, "window")
    engine.add_request("3", again, params)
    assert drain(engine)["3"].cache_limit == "complete"
    engine.close()
