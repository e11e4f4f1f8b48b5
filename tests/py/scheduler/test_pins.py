"""Pins that give way: requests run, smaller budgets are taken, and nothing is left behind."""

from __future__ import annotations

import time

import pytest

torch = pytest.importorskip("torch")

from flexinfer import LLMEngine, OutOfMemoryError
from helpers.engine_kit import TOKEN_BYTES, check, drain, make_engine, submit
from helpers.tiny_models import random_prompts

BUDGET = 160 * TOKEN_BYTES


def with_pins(num_tokens: tuple[int, ...], ttl_s: float = 60, **settings: object) -> LLMEngine:
    """An engine that has computed prompts of these lengths and keeps them, oldest first."""
    engine = make_engine(kv_cache_memory_bytes=BUDGET, max_model_len=120, **settings)
    prompts = random_prompts(num_tokens)
    for i, prompt in enumerate(prompts):
        submit(engine, [prompt])
        drain(engine)
        assert engine.scheduler.pins.keep(f"owner {i}", prompt, ttl_s) > 0
    return engine


def pinned_by(engine: LLMEngine) -> set[str]:
    prefixes = engine.manager.snapshot().prefixes
    return {owner for prefix in prefixes for owner in prefix.pinned_by}


@pytest.mark.parametrize("mode", ["off", "recompute", "swap"])
def test_a_request_runs_although_pins_hold_nearly_all_memory(mode: str) -> None:
    engine = with_pins((40, 40, 40), preemption_mode=mode, swap_space="1MiB")
    prompts = random_prompts((60, 50), seed=9)
    submit(engine, prompts[:1])
    check(drain(engine), prompts[:1])
    assert "owner 0" not in pinned_by(engine), "the longest idle one gives way"
    assert "owner 2" in pinned_by(engine), "and no more than must"
    submit(engine, prompts)
    check(drain(engine), prompts)
    engine.manager.check_integrity()
    engine.close()


def test_a_pin_that_was_kept_again_is_released_last() -> None:
    engine = with_pins((40, 40, 40))
    pins = engine.scheduler.pins
    pins.keep("owner 0", random_prompts((40, 40, 40))[0], 60)
    assert pins.release_oldest()
    assert pinned_by(engine) == {"owner 0", "owner 2"}
    assert pins.release_oldest()
    assert pins.release_oldest()
    assert not pins.release_oldest()
    assert (len(pins), pins.num_released) == (0, 3)
    engine.close()


def test_a_smaller_budget_is_taken_although_pins_hold_more() -> None:
    engine = with_pins((40, 40, 40))
    engine.set_kv_cache_memory(60 * TOKEN_BYTES)
    assert engine.manager.stats().resident_bytes <= 60 * TOKEN_BYTES
    assert pinned_by(engine) == {"owner 2"}
    engine.close()


def test_pins_of_the_manager_s_owner_are_never_released() -> None:
    engine = make_engine(kv_cache_memory_bytes=BUDGET, max_model_len=120)
    prompts = random_prompts((100,))
    submit(engine, prompts)
    drain(engine)
    engine.manager.pin_prefix(prompts[0], "mine")
    with pytest.raises(OutOfMemoryError, match="pinned prefixes hold the rest"):
        engine.set_kv_cache_memory(50 * TOKEN_BYTES)
    assert pinned_by(engine) == {"mine"}
    engine.close()


@pytest.mark.parametrize("level", [1, 2])
def test_what_is_asked_for_asleep_is_done_at_waking(level: int) -> None:
    engine = with_pins((40, 40))
    pins, prompts = engine.scheduler.pins, random_prompts((40, 40))
    engine.sleep(level)
    pins.drop("owner 0")
    assert pins.keep("owner 1", prompts[1][:20], 60) == 0
    pins.keep("owner 2", prompts[1], 60)
    pins.drop("owner 2")
    assert pinned_by(engine) == {"owner 0", "owner 1"}
    engine.wake_up()
    assert pinned_by(engine) == {"owner 1"}
    engine.reset_prefix_cache()
    assert engine.manager.match_prefix(prompts[1]) == 20
    engine.manager.check_integrity()
    engine.close()


def test_expired_pins_are_forgotten() -> None:
    engine = with_pins((40,), ttl_s=0.05)
    time.sleep(0.06)
    assert len(engine.scheduler.pins) == 0
    assert not engine.scheduler.pins.release_oldest()
    engine.reset_prefix_cache()
    assert engine.manager.stats().recorded_bytes == 0
    engine.close()
