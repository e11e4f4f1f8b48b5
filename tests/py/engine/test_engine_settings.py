"""Switches of an engine, what its stats tell, and what bad settings and calls say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flexinfer import LLM, RequestError
from flexinfer.config import EngineConfig
from helpers.engine_kit import GREEDY, NUM_NEW, check, drain, make_engine, submit
from helpers.tiny_models import make_model, random_prompts

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
        ({"swap_space": -1}, "swap_space is a number of bytes from 0 .*, got -1"),
        ({"prefix_cache_memory": 2**70}, "prefix_cache_memory is a number of bytes"),
        ({"swap_space": None}, "swap_space is a number of bytes"),
        ({"max_num_seqs": 10**9}, "max_num_seqs must be at most 65536, got 1000000000"),
        ({"max_num_seqs": "many"}, "max_num_seqs must be a positive integer, got 'many'"),
        ({"max_num_batched_tokens": 10**20}, "max_num_batched_tokens must be at most 2147483647"),
        ({"max_model_len": 10**20}, "max_model_len must be at most 2147483647"),
        ({"layers_per_plane": 10**20}, "layers_per_plane must be at most 2147483647"),
        ({"distributed_timeout_s": "x"}, "distributed_timeout_s must be a finite number, got 'x'"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching must be True or False, got 'no'"),
        ({"free_memory_low": "2MiB", "free_memory_high": "1MiB"}, "must not be above"),
        ({"kv_cache_memory_bytes": "lots"}, "kv_cache_memory_bytes is a number of bytes"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_engine(**settings)


def test_sizes_may_be_numbers_of_numpy() -> None:
    names = ("max_num_seqs", "max_model_len", "state_snapshot_tokens", "seed")
    numbers: Any = dict.fromkeys(names, np.int64(64))
    config = EngineConfig(model="m", **numbers)
    assert {type(getattr(config, name)) for name in names} == {int}


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
