"""Ranks that verify proposals: what is rejected is taken back on all of them."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from flexinfer import SamplingParams
from flexinfer.speculation.step_costs import StepCosts
from helpers.engine_kit import preempt_at_random, submit
from helpers.rank_kit import make_ranked_engine
from helpers.tiny_models import random_prompts, reference


def test_proposals_change_no_token_and_are_taken_back_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With forced swaps, between which books are compared in every step. Proposals pay, whatever
    others do to the time of a step."""
    monkeypatch.setattr(StepCosts, "estimate", lambda _, num, further: [1.0] * (further + 1))
    speculation = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    swap = {"swap_space": "4MiB", "preemption_mode": "swap"}
    engine = make_ranked_engine(speculative_config=speculation, **swap)
    prompts = [prompt * 3 for prompt in random_prompts((9, 12, 7))]
    try:
        submit(engine, prompts, SamplingParams(temperature=0, max_tokens=60))
        final, rng = {}, random.Random(0)
        while engine.has_unfinished_requests():
            preempt_at_random(engine, rng, 0.1)
            final.update({output.request_id: output for output in engine.step()})
        found = engine.stats().speculation
        assert found is not None
        assert 0 < found.num_accepted_tokens < found.num_draft_tokens
    finally:
        engine.close()
    for i, prompt in enumerate(prompts):
        expected = reference("llama", tuple(prompt), 60)
        assert final[str(i)].outputs[0].token_ids == expected
