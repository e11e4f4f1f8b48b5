"""Calibration: steps of a real engine, and the costs that explain them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from flexinfer.simulation.step_cost import StepCost, StepWork, fit_cost

if TYPE_CHECKING:
    from flexinfer.llm import LLM
    from flexinfer.scheduler.batch import Batch

BATCHES = ((1, 32, 12), (4, 128, 12), (16, 64, 16), (32, 16, 16), (8, 384, 8), (1, 768, 4))
"""Requests, tokens of each prompt, tokens to generate. Longer ones are cut to what the model takes,
wider ones to what the engine does."""


def calibrate(model: str, **settings: Any) -> StepCost:
    """Open the model, run some batches twice, and fit the second run's steps; about ten seconds on
    a small model. settings: of the engine. Raises ValueError or OSError for a model that cannot be
    opened."""
    from flexinfer.cli.settings import EngineSettings
    from flexinfer.llm import LLM

    folder = EngineSettings(model=model).check_model()
    settings = {"enable_prefix_caching": False, "skip_tokenizer_init": True, **settings}
    with LLM(folder, **settings) as llm:
        measure_steps(llm)
        return fit_cost(measure_steps(llm))


def measure_steps(llm: LLM) -> list[tuple[StepWork, float]]:
    """Work and seconds of each step of all batches."""
    from flexinfer.sampling.params import SamplingParams

    engine = llm.engine
    config = engine.scheduler.config
    rng = random.Random(0)
    work = StepWork()
    advance = engine.scheduler.advance

    def noting(batch: Batch) -> None:
        nonlocal work
        work = StepWork.of(batch.items)
        advance(batch)

    steps = []
    engine.scheduler.advance = noting  # type: ignore[method-assign]  # until the end
    try:
        for num_requests, num_prompt, num_new in BATCHES:
            num_prompt = min(num_prompt, config.max_model_len - num_new)
            params = SamplingParams(max_tokens=num_new, ignore_eos=True)
            for number in range(min(num_requests, config.max_num_seqs)):
                tokens = [rng.randrange(engine.loaded.vocab_size) for _ in range(num_prompt)]
                engine.add_request(f"{number}", {"prompt_token_ids": tokens}, params)
            while engine.has_unfinished_requests():
                engine.step()
                assert engine.last_step is not None
                steps.append((work, engine.last_step.step_us / 1e6))
    finally:
        engine.scheduler.advance = advance  # type: ignore[method-assign]
    return steps
