"""Preemption in a serving engine, by recomputing and by swapping: no token changes."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import Mock

import pytest

torch = pytest.importorskip("torch")

from flexinfer import SamplingParams
from flexinfer.errors import DriverError
from flexinfer.sampling.params import BeamSearchParams
from flexinfer.vtensor import VTensor
from helpers.engine_kit import (
    NUM_NEW,
    TOKEN_BYTES,
    check,
    drain,
    make_engine,
    preempt_at_random,
    submit,
)
from helpers.tiny_models import random_prompts, reference


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
        preempt_at_random(engine, rng, 0.3)
        if len(aborted) < 2 and rng.random() < 0.05:
            aborted.add(rng.choice("012345"))
            engine.abort_request(aborted)
        for output in engine.step():
            final[output.request_id] = output
        engine.manager.check_integrity()
    check(final, prompts, cut_short=aborted)
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
        final = drain(engine, rng if preempts else None, 0.3)
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
    engine = make_engine(preemption_mode="swap", swap_space="4KiB", enable_prefix_caching=False)
    prompts = random_prompts((30, 30))
    submit(engine, prompts)
    engine.step()
    engine.scheduler.preempt(engine.scheduler.running["1"], "test")
    assert engine.stats().preemptions["recompute"] == {"test: swap space is full": 1}
    check(drain(engine), prompts)
    engine.close()


def test_a_full_disk_recomputes_instead(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended all requests, and the server."""
    engine = make_engine(preemption_mode="swap", swap_space="1MiB", enable_prefix_caching=False)
    prompts = random_prompts((30, 30))
    submit(engine, prompts)
    engine.step()
    full = DriverError("pwrite(offset=8192) failed with No space left on device (28)")
    monkeypatch.setattr(VTensor, "try_swap_out", Mock(side_effect=full))
    for request_id in "10":
        engine.scheduler.preempt(engine.scheduler.running[request_id], "test")
    assert engine.stats().preemptions["recompute"] == {"test: swap space is full": 2}
    assert [record.message for record in caplog.records if "No space left" in record.message] == [
        f"requests are computed again instead of swapped: {full}"
    ]
    check(drain(engine), prompts)
    engine.close()


def test_a_shortage_of_the_system_is_not_called_one_of_the_budget() -> None:
    engine = make_engine()
    submit(engine, random_prompts((20,)))
    engine.step()
    message = engine.scheduler.admission.explain_shortage(engine.scheduler.running["0"])
    assert "the budget has them, but the system gives no more memory" in message
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
    check(final, prompts, 16, cut_short={"2"})
    engine.close()


@pytest.mark.parametrize("has_cache", [True, False])
@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
@pytest.mark.parametrize(
    "params",
    [SamplingParams(n=3, seed=1, max_tokens=5), BeamSearchParams(beam_width=3, max_tokens=5)],
)
def test_who_is_left_of_siblings_copies_no_row_that_does_not_fit(
    params: Any, mode: str, has_cache: bool
) -> None:
    """The chunk is all there is, and the row where they parted is still shared: one is computed
    anew, as it would have been admitted."""
    settings = {"chunk_bytes": 16384, "max_model_len": 16, "enable_prefix_caching": has_cache}
    settings |= {"swap_space": "1MiB", "preemption_mode": mode}
    answers = []
    for num_chunks in (1, 32):
        engine = make_engine(kv_cache_memory_bytes=num_chunks * 16384, **settings)
        engine.add_request("x", list(range(5, 13)), params)
        (output,) = drain(engine).values()
        answers.append([(part.finish_reason, part.token_ids) for part in output.outputs])
        engine.manager.check_integrity()
        engine.close()
    assert answers[0] == answers[1]
    assert {reason for reason, _ in answers[0]} == {"length"}
