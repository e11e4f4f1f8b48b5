"""Engines over tiny models with little memory, run to the end and compared with transformers."""

from __future__ import annotations

from collections.abc import Collection
from itertools import count
from random import Random
from typing import Any

from flexinfer import LLMEngine, SamplingParams
from flexinfer.config import EngineConfig
from flexinfer.outputs import RequestOutput
from flexinfer.scheduler.batch import Batch
from helpers.tiny_models import make_model, reference

NUM_NEW = 14
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW)
TOKEN_BYTES = 2 * 4 * 2 * 16 * 4
"""K and V of one token of the tiny Llama: 4 layers, 2 heads of 16, float32."""


def make_engine(model: Any = "llama", **settings: Any) -> LLMEngine:
    """model: one of `tiny_models.CONFIGS` by its name, or a model itself."""
    defaults = {"max_num_seqs": 4, "kv_cache_memory_bytes": 4 << 20, "chunk_bytes": 4096}
    model = make_model(model) if isinstance(model, str) else model
    config = {**defaults, "model": model, "skip_tokenizer_init": True, **settings}
    return LLMEngine.from_engine_args(EngineConfig(**config))


def submit(engine: LLMEngine, prompts: list[list[int]], params: SamplingParams = GREEDY) -> None:
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)


def preempt_at_step(engine: LLMEngine, at_step: int) -> None:
    """Have the scheduler preempt the request that it would choose, before that step."""
    scheduler = engine.scheduler
    schedule, steps = scheduler.schedule, count()

    def preempting() -> Batch:
        if next(steps) == at_step:
            scheduler.preempt(scheduler.choose_victim(), "growth")
        return schedule()

    scheduler.schedule = preempting  # type: ignore[method-assign]  # of this engine, to its end


def preempt_at_random(engine: LLMEngine, rng: Random, share: float) -> None:
    """Preempt any of the running requests, before that share of the steps."""
    running = list(engine.scheduler.running.values())
    if running and rng.random() < share:
        engine.scheduler.preempt(rng.choice(running), "test")


def drain(
    engine: LLMEngine, rng: Random | None = None, preempted: float = 0.1
) -> dict[str, RequestOutput]:
    """The last output of each request, by its id; the manager's invariants hold after each step.

    rng: given one, a request is preempted before so many of the steps (`preempt_at_random`).
    """
    final: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        if rng is not None:
            preempt_at_random(engine, rng, preempted)
        for output in engine.step():
            final[output.request_id] = output
        engine.manager.check_integrity()
    return final


def run(engine: LLMEngine, prompts: list[list[int]], num_new: int) -> dict[str, RequestOutput]:
    """`num_new` greedy tokens for each prompt, whose request is called by its index."""
    submit(engine, prompts, SamplingParams(temperature=0, max_tokens=num_new))
    return drain(engine)


def check_nothing_is_left(engine: LLMEngine) -> None:
    engine.manager.check_integrity()
    assert not engine.has_unfinished_requests()
    assert engine.get_num_unfinished_requests() == 0
    assert engine.manager.stats().num_vtensors == 0


def check(
    final: dict[str, RequestOutput],
    prompts: list[list[int]],
    num_new: int = NUM_NEW,
    cut_short: Collection[str] = (),
) -> None:
    """Each request, but for the ``cut_short``, went on to its end as transformers goes on."""
    for i, prompt in enumerate(prompts):
        if str(i) in cut_short:
            continue
        output = final[str(i)].outputs[0]
        assert output.finish_reason == "length", (i, output.finish_reason, output.stop_reason)
        assert output.token_ids == reference("llama", tuple(prompt), num_new), i
