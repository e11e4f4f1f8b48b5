"""Verified proposals leave the distribution of what is sampled as it is: a chi-squared test."""

from __future__ import annotations

from array import array
from collections import Counter

import pytest

torch = pytest.importorskip("torch")

from flexinfer import SamplingParams
from flexinfer.runner.model_runner import ModelRunner
from flexinfer.runner.plan import StepPlan
from flexinfer.sampling.sampler import Sampler
from flexinfer.sampling.sequences import SequenceSetup

FIRST = (0.5, 0.2, 0.2, 0.1)
SECOND = (0.1, 0.2, 0.3, 0.4)
"""Probabilities of the token after the prompt, and of the one after the proposed token."""
NUM = 4000


@pytest.mark.parametrize("proposed", [0, 3])
def test_pairs_of_tokens_have_the_models_probabilities(proposed: int) -> None:
    runner = ModelRunner.__new__(ModelRunner)
    runner.sampler = Sampler(11, torch.device("cpu"))
    runner.sampler.sequences.add(SequenceSetup(i, SamplingParams(), 1) for i in range(NUM))
    plan = StepPlan(
        token_ids=array("i", [2, proposed] * NUM).tobytes(),
        slots=(0,) * NUM,
        starts=(0,) * NUM,
        ends=(2,) * NUM,
        num_decodes=0,
        sampled_rows=tuple(range(2 * NUM)),
        sampling_ids=tuple(i // 2 for i in range(2 * NUM)),
        sampled_lengths=(1, 2) * NUM,
    )
    logits = torch.tensor([FIRST, SECOND]).log().repeat(NUM, 1)
    found: dict[int, list[int]] = {}
    for token in runner.begin_sampling(logits, plan).result().tokens:
        found.setdefault(token.sampling_id, []).append(token.token_id)
    counts = Counter(tuple(tokens) for tokens in found.values())
    expected = {(t,): NUM * p for t, p in enumerate(FIRST) if t != proposed}
    expected |= {(proposed, t): NUM * FIRST[proposed] * p for t, p in enumerate(SECOND)}
    assert counts.keys() == expected.keys()
    chi_squared = sum((counts[k] - mean) ** 2 / mean for k, mean in expected.items())
    assert chi_squared < 22.46  # 6 degrees of freedom: once in 1,000 seeds
