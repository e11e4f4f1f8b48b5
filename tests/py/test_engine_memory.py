"""Preemption, elastic memory, sleep, pins and stats of a serving engine: outputs stay the same."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer import LLM, LLMEngine, OutOfMemoryError, RequestError, SamplingParams
from flexinfer.config import EngineConfig
from flexinfer.outputs import RequestOutput
from flexinfer.sampling_params import BeamSearchParams
from tiny_models import make_model, random_prompts, reference

NUM_NEW = 14
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW)
TOKEN_BYTES = 2 * 4 * 2 * 16 * 4
"""K and V of one token of the tiny Llama: 4 layers, 2 heads of 16, float32."""


def make_engine(**settings: Any) -> LLMEngine:
    defaults = {"max_num_seqs": 4, "kv_cache_memory_bytes": 4 << 20, "chunk_bytes": 4096}
    config = {**defaults, "model": make_model("llama"), "skip_tokenizer_init": True, **settings}
    return LLMEngine(EngineConfig(**config))


def submit(engine: LLMEngine, prompts: list[list[int]], params: SamplingParams = GREEDY) -> None:
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)


def drain(engine: LLMEngine, final: dict[str, RequestOutput] | None = None) -> dict[str, Any]:
    final = {} if final is None else final
    while engine.has_unfinished_requests():
        for output in engine.step():
            final[output.request_id] = output
    return final


def check(final: dict[str, Any], prompts: list[list[int]], num_new: int = NUM_NEW) -> None:
    for i, prompt in enumerate(prompts):
        if str(i) in final and final[str(i)].outputs[0].finish_reason == "length":
            expected = reference("llama", tuple(prompt), num_new)
            assert final[str(i)].outputs[0].token_ids == expected


# Preemption.


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_forced_preemption_at_random_steps_changes_no_token(mode: str, seed: int) -> None:
    rng = random.Random(seed)
    engine = make_engine(
        preemption_mode=mode,
        swap_space="4MiB",
        max_num_batched_tokens=rng.choice([4, 7, 16, 64]),
        enable_prefix_caching=rng.random() < 0.5,
        layers_per_plane=rng.choice([None, 1]),
    )
    prompts = random_prompts((20, 33, 7, 41, 12, 28), seed=seed)
    prompts[3][:20] = prompts[1][:20]
    submit(engine, prompts)
    aborted = set()
    final: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        running = list(engine.scheduler.running.values())
        if running and rng.random() < 0.3:
            engine.scheduler.preempt(rng.choice(running), "test")
        if len(aborted) < 2 and rng.random() < 0.05:
            aborted.add(rng.choice("012345"))
            engine.abort_request(aborted)
        for output in engine.step():
            final[output.request_id] = output
        engine.manager.check_integrity()
    check(final, prompts)
    assert set(final) | aborted == set("012345")
    assert sum(engine.stats().preemptions[mode].values()) > 0
    assert engine.manager.stats().swapped_bytes == 0
    engine.close()


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
def test_a_shortage_preempts_and_every_request_ends_right(mode: str) -> None:
    engine = make_engine(
        kv_cache_memory_bytes=80 * TOKEN_BYTES,
        max_model_len=60,
        preemption_mode=mode,
        swap_space="1MiB",
    )
    prompts = random_prompts((20, 30, 25, 28))
    submit(engine, prompts, SamplingParams(temperature=0, max_tokens=24))
    final = drain(engine)
    check(final, prompts, 24)
    counts = engine.stats().preemptions
    assert sum(counts["recompute"].values()) + sum(counts["swap"].values()) > 0
    if mode != "auto":
        assert next(iter(counts[mode])) == "growth: configured"
    engine.close()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=NUM_NEW),
        BeamSearchParams(beam_width=3, max_tokens=NUM_NEW),
    ],
    ids=["n=3", "beams"],
)
def test_preempting_one_of_several_sequences_changes_none_of_them(params: Any, mode: str) -> None:
    prompts = random_prompts((20, 9))
    outputs = {}
    for preempts in (False, True):
        rng = random.Random(5)
        engine = make_engine(preemption_mode=mode, swap_space="4MiB", max_num_seqs=6)
        submit(engine, prompts, params)
        final: dict[str, Any] = {}
        while engine.has_unfinished_requests():
            running = list(engine.scheduler.running.values())
            if preempts and running and rng.random() < 0.3:
                engine.scheduler.preempt(rng.choice(running), "test")
            for output in engine.step():
                final[output.request_id] = output
            engine.manager.check_integrity()
        outputs[preempts] = {i: [o.token_ids for o in f.outputs] for i, f in final.items()}
        engine.close()
    assert outputs[True] == outputs[False]


def test_swapped_requests_come_back_before_new_ones_are_admitted() -> None:
    engine = make_engine(preemption_mode="swap", swap_space="1MiB", max_num_seqs=2)
    submit(engine, random_prompts((20, 20, 20)))
    engine.step()
    engine.scheduler.preempt(engine.scheduler.running["1"], "test")
    assert engine.stats().num_swapped == 1
    engine.step()
    assert set(engine.scheduler.running) == {"0", "1"}
    engine.close()


def test_a_full_swap_space_recomputes_instead() -> None:
    engine = make_engine(preemption_mode="swap", swap_space="4KiB")
    prompts = random_prompts((30, 30))
    submit(engine, prompts)
    engine.step()
    engine.scheduler.preempt(engine.scheduler.running["1"], "test")
    assert engine.stats().preemptions["recompute"] == {"test: swap space is full": 1}
    check(drain(engine), prompts)
    engine.close()


def test_without_preemption_a_shortage_ends_one_request_with_the_numbers() -> None:
    engine = make_engine(
        kv_cache_memory_bytes=80 * TOKEN_BYTES,
        max_model_len=60,
        preemption_mode="off",
        enable_prefix_caching=False,
    )
    prompts = random_prompts((20, 20, 20))
    submit(engine, prompts, SamplingParams(temperature=0, max_tokens=16))
    final = drain(engine)
    ends = {i: output.outputs[0].finish_reason for i, output in final.items()}
    assert ends == {"0": "length", "1": "length", "2": "error"}
    assert "2 other requests run and preemption is off" in str(final["2"].outputs[0].stop_reason)
    assert (
        final["2"].outputs[0].token_ids
        == reference("llama", tuple(prompts[2]), 16)[: len(final["2"].outputs[0].token_ids)]
    )
    check(final, prompts, 16)
    engine.close()


# Elastic memory.


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_lower_budget_preempts_and_a_higher_one_goes_on(mode: str) -> None:
    engine = make_engine(preemption_mode=mode, swap_space="1MiB")
    prompts = random_prompts((40, 40, 40, 40))
    submit(engine, prompts)
    for _ in range(4):
        engine.step()
    small = 64 * TOKEN_BYTES
    change = engine.set_kv_cache_memory(small)
    assert change.num_preempted >= 2
    assert engine.manager.stats().resident_bytes <= small
    assert change.returned_bytes > 0
    assert change.seconds < 1.0
    engine.manager.check_integrity()
    for _ in range(5):
        engine.step()
    engine.set_kv_cache_memory("4MiB")
    check(drain(engine), prompts)
    engine.close()


def test_a_lower_budget_forgets_prefixes_before_it_preempts() -> None:
    engine = make_engine()
    submit(engine, random_prompts((100, 100, 100)))
    drain(engine)
    recorded = engine.manager.stats().recorded_bytes
    change = engine.set_kv_cache_memory(recorded // 2)
    assert change.num_preempted == 0
    assert 0 < engine.manager.stats().recorded_bytes <= recorded // 2
    engine.close()


def test_without_preemption_a_budget_below_what_runs_is_refused_with_the_numbers() -> None:
    engine = make_engine(preemption_mode="off")
    prompts = random_prompts((40, 40, 40))
    submit(engine, prompts)
    engine.step()
    before = engine.manager.memory_budget
    with pytest.raises(OutOfMemoryError, match="3 requests run and preemption is off") as error:
        engine.set_kv_cache_memory(60 * TOKEN_BYTES)
    assert error.value.budget_bytes == 60 * TOKEN_BYTES
    assert engine.manager.memory_budget == before
    check(drain(engine), prompts)
    engine.close()


def test_a_budget_in_which_a_request_could_never_end_is_refused() -> None:
    engine = make_engine()
    submit(engine, random_prompts((40,)))
    with pytest.raises(ValueError, match=r"too little for request '0', which may need \d+ bytes"):
        engine.set_kv_cache_memory(20 * TOKEN_BYTES)
    engine.close()


@pytest.mark.parametrize("directory", [None, "folder"])
@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_all_memory_back_and_requests_go_on(
    level: int, directory: str | None, tmp_path: Any
) -> None:
    engine = make_engine(swap_directory=None if directory is None else str(tmp_path))
    prompts = random_prompts((20, 33, 7, 41, 12))
    submit(engine, prompts)
    for _ in range(4):
        engine.step()
    assert engine.sleep(level) > 0
    assert engine.is_sleeping()
    assert engine.manager.stats().resident_bytes == 0
    with pytest.raises(ValueError, match="asleep"):
        engine.step()
    engine.wake_up()
    check(drain(engine), prompts)
    engine.close()


def test_prefixes_survive_a_sleep_of_level_1_only() -> None:
    cached = {}
    prompt = random_prompts((64,))[0]
    for level in (1, 2):
        engine = make_engine()
        submit(engine, [prompt])
        drain(engine)
        engine.sleep(level)
        engine.wake_up()
        submit(engine, [prompt])
        cached[level] = drain(engine)["0"].num_cached_tokens
        engine.close()
    assert cached == {1: 63, 2: 0}


def test_requests_may_come_and_go_while_the_engine_sleeps() -> None:
    engine = make_engine(preemption_mode="swap", swap_space="1MiB")
    prompts = random_prompts((20, 30, 25, 18))
    submit(engine, prompts[:3])
    engine.step()
    engine.scheduler.preempt(engine.scheduler.running["2"], "test")
    engine.sleep()
    assert [output.request_id for output in engine.abort_request(["0", "2"])] == ["0", "2"]
    engine.add_request("3", prompts[3], GREEDY)
    engine.wake_up()
    final = drain(engine)
    assert set(final) == {"1", "3"}
    check(final, prompts)
    assert engine.manager.stats().num_vtensors == 0
    engine.close()


def test_a_pinned_prefix_survives_pressure_until_it_is_unpinned() -> None:
    engine = make_engine(kv_cache_memory_bytes=160 * TOKEN_BYTES, max_model_len=100)
    system, *others = random_prompts((32, 60, 60, 60))
    submit(engine, [system])
    drain(engine)
    assert engine.pin_prefix(system, "system prompt", ttl_s=600) == 32
    submit(engine, others)
    drain(engine)
    assert engine.manager.match_prefix(system) == 32
    assert engine.unpin_prefix("system prompt") == 1
    assert engine.reset_prefix_cache() > 0
    assert engine.manager.match_prefix(system) == 0
    engine.close()


# Stats and switches.


def test_stats_tell_each_step_and_the_total() -> None:
    engine = make_engine(chunk_bytes=4096)
    submit(engine, random_prompts((20, 30)))
    exposed = 0.0
    while engine.has_unfinished_requests():
        engine.step()
        assert engine.last_step is not None
        exposed += engine.last_step.map_us_exposed
    stats = engine.stats()
    assert stats.steps.num_steps == NUM_NEW
    assert stats.steps.map_us_exposed == pytest.approx(exposed)
    assert stats.steps.num_prefill_tokens == 50
    assert stats.as_dict()["memory"]["chunks_deduplicated"] == 0
    engine.close()


@pytest.mark.parametrize("enabled", [True, False])
def test_prefixes_computed_side_by_side_are_mapped_onto_one(enabled: bool) -> None:
    engine = make_engine(wait_for_shared_prefix=False, enable_dedup=enabled)
    prompt = random_prompts((40,))[0]
    submit(engine, [prompt, prompt])
    check(drain(engine), [prompt, prompt])
    assert engine.stats().memory is not None
    assert (engine.stats().memory.chunks_deduplicated > 0) is enabled  # type: ignore[union-attr]
    engine.close()


@pytest.mark.parametrize("enabled", [True, False])
def test_pre_extension_can_be_switched_off(enabled: bool) -> None:
    engine = make_engine(enable_pre_extend=enabled)
    prompts = random_prompts((20, 30))
    submit(engine, prompts)
    final: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            final[output.request_id] = output
        engine.manager.drain()
    check(final, prompts)
    assert (engine.manager.mapping_times().pre_extended_rows > 0) is enabled
    engine.close()


def test_eager_allocation_keeps_free_chunks_between_the_watermarks() -> None:
    engine = make_engine(free_memory_low="64KiB", free_memory_high="128KiB")
    submit(engine, random_prompts((20, 30)))
    drain(engine)
    engine.manager.drain()
    assert (64 << 10) <= engine.manager.stats().free_bytes <= (128 << 10)
    engine.close()


def test_memory_follows_what_is_in_use_and_not_what_was() -> None:
    """Prefixes that nobody uses keep at most `prefix_cache_memory` while new requests come."""
    sizes = []
    for bound in ("256KiB", "1GiB"):
        engine = make_engine(prefix_cache_memory=bound, eager_allocation=False)
        for seed in range(12):
            prompts = random_prompts((40, 50), seed)
            submit(engine, prompts)
            check(drain(engine), prompts)
        sizes.append(engine.manager.stats().resident_bytes)
        engine.close()
    assert sizes[1] > 2 * sizes[0]


def test_without_eager_allocation_and_parking_nothing_is_kept() -> None:
    engine = make_engine(
        eager_allocation=False,
        enable_deferred_reclamation=False,
        enable_prefix_caching=False,
        free_memory_high=0,
    )
    submit(engine, random_prompts((20, 30)))
    drain(engine)
    engine.manager.pre_extend([], [])
    engine.manager.drain()
    stats = engine.manager.stats()
    assert stats.parked_bytes == stats.free_bytes == stats.resident_bytes == 0
    engine.close()


def test_the_default_budget_is_derived_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "flexinfer"):
        engine = make_engine(kv_cache_memory_bytes=None, chunk_bytes=None)
    told = [record.getMessage() for record in caplog.records if "KV cache memory" in record.message]
    assert told == [str(engine.kv_memory)]
    assert "50% of" in told[0]
    assert "container" in told[0]
    assert engine.manager.memory_budget <= engine.kv_memory.budget_bytes
    engine.close()


# Bad input.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preemption_mode": "swap"}, "needs swap_space"),
        ({"preemption_mode": "never"}, "preemption_mode must be one of 'recompute'"),
        ({"scheduling_policy": "random"}, "scheduling_policy must be one of 'fcfs'"),
        ({"max_passed_over": 0}, "max_passed_over must be a positive integer, got 0"),
        ({"swap_space": -1}, "swap_space must be a number of bytes, got -1"),
        ({"free_memory_low": "2MiB", "free_memory_high": "1MiB"}, "must not be above"),
        ({"kv_cache_memory_bytes": "lots"}, "kv_cache_memory_bytes is a number of bytes"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_engine(**settings)


def test_unknown_settings_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="preemtion_mode"):
        LLM(make_model("llama"), skip_tokenizer_init=True, preemtion_mode="off")


@pytest.mark.parametrize("priority", [5, "high", 1.5, True])
def test_bad_priorities_are_refused(priority: Any) -> None:
    engine = make_engine(scheduling_policy="fcfs")
    with pytest.raises(RequestError, match="priority"):
        engine.add_request("a", [1, 2], GREEDY, priority=priority)
    assert not engine.has_unfinished_requests()
    engine.close()


@pytest.mark.parametrize("call", [lambda e: e.sleep(3), lambda e: e.pin_prefix([1], "me", ttl_s=0)])
def test_bad_calls_are_refused(call: Any) -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match=r"level must be 1 or 2|ttl_s must be a positive"):
        call(engine)
    engine.close()


def test_a_trace_names_the_requests(tmp_path: Any) -> None:
    file = tmp_path / "trace.jsonl"
    engine = make_engine(trace=str(file))
    engine.add_request("conversation-7", random_prompts((20,))[0], GREEDY)
    drain(engine)
    assert engine.manager.tracing
    engine.close()
    assert "conversation-7" in file.read_text()


# What is held.


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("layers_per_plane", [None, 1])
def test_a_running_request_holds_at_most_a_chunk_beyond_those_of_its_tokens(
    layers_per_plane: int | None, seed: int
) -> None:
    rng = random.Random(seed)
    engine = make_engine(
        layers_per_plane=layers_per_plane, max_num_batched_tokens=rng.choice([7, 16, 64])
    )
    manager = engine.manager
    row_bytes = manager.chunk_bytes * manager.spec.num_planes
    shared = rng.choices(range(100), k=24)
    for _ in range(3):  # later ones find parked slots and recorded prefixes
        prompts = random_prompts(tuple(rng.choices(range(2, 60), k=6)), seed=rng.randrange(1000))
        submit(engine, [shared + prompt if rng.random() < 0.5 else prompt for prompt in prompts])
        while engine.has_unfinished_requests():
            engine.step()
            for request in engine.scheduler.running.values():
                num_rows = -(-request.num_tokens * TOKEN_BYTES // row_bytes)
                assert request.vtensor is not None
                assert request.vtensor.info().mapped_bytes <= (num_rows + 1) * row_bytes
    engine.close()
