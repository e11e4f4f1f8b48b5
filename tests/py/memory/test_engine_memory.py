"""Memory of a serving engine: elastic budgets, sleep, pins, what is held; outputs stay the same."""

from __future__ import annotations

import ctypes
import random
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer import OutOfMemoryError
from helpers.engine_kit import GREEDY, NUM_NEW, TOKEN_BYTES, check, drain, make_engine, submit
from helpers.tiny_models import random_prompts

# Elastic memory.


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_lower_budget_preempts_and_a_higher_one_goes_on(mode: str) -> None:
    engine = make_engine(preemption_mode=mode, swap_space="1MiB")
    prompts = random_prompts((40, 40, 40, 40))
    submit(engine, prompts)
    for _ in range(4):
        engine.step()
    small = 64 * TOKEN_BYTES
    before_s = time.perf_counter()
    change = engine.set_kv_cache_memory(small)
    assert 0 < change.seconds <= time.perf_counter() - before_s
    assert change.num_preempted >= 2
    assert engine.manager.stats().resident_bytes <= small
    assert change.returned_bytes > 0
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


@pytest.mark.parametrize(("budget", "prompts_kept"), [("4MiB", 16), ("1MiB", 4), ("8MiB", 32)])
def test_what_idle_prefixes_may_hold_follows_the_budget(budget: str, prompts_kept: int) -> None:
    """An eighth of it: 4 MiB keep 512 KiB, 16 prompts of 32 KiB."""
    engine = make_engine(max_num_seqs=1, eager_allocation=False)
    engine.set_kv_cache_memory(budget)
    num_tokens = (32 << 10) // TOKEN_BYTES
    for prompt in random_prompts((num_tokens - NUM_NEW + 1,) * 40):
        submit(engine, [prompt])
        drain(engine)
    stats = engine.manager.stats()
    assert stats.resident_bytes == (prompts_kept + 1) * (32 << 10)  # and those of the last one
    engine.close()


def test_free_memory_kept_ready_counts_as_idle() -> None:
    engine = make_engine(max_num_seqs=1, free_memory_low="128KiB", prefix_cache_memory="256KiB")
    num_tokens = (32 << 10) // TOKEN_BYTES
    for prompt in random_prompts((num_tokens - NUM_NEW + 1,) * 20):
        submit(engine, [prompt])
        drain(engine)
        engine.manager.drain()
    assert engine.manager.stats().resident_bytes <= (256 + 32 + 16) << 10
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
    submit(engine, random_prompts((2, 40, 3)))
    with pytest.raises(ValueError, match=r"too little for request '1', which may need \d+ bytes"):
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


def test_sleep_gives_back_what_malloc_keeps_for_the_next_steps() -> None:
    """Blocks under one that lives stay in the heap when they are freed; a step's are such."""
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("not glibc")
    engine = make_engine()
    blocks = [bytearray(b"x" * (96 << 10)) for _ in range(640)]
    del blocks[:-1]
    before = resident_bytes()
    engine.sleep()
    assert before - resident_bytes() > 40 << 20
    assert len(blocks) == 1
    engine.close()


def resident_bytes() -> int:
    """Without shared memory, where the KV pool is."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


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
    check({"0": final["1"], "1": final["3"]}, prompts[1::2])
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
