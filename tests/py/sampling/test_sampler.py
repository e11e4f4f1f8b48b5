"""The batched sampler against a slow one that does a request at a time, and transformers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st

from flexinfer import SamplingParams
from flexinfer.sampling.sampler import (
    Sampler,
    apply_bias,
    apply_min_p,
    apply_penalties,
    apply_top_k_top_p,
)

torch.set_num_threads(1)
VOCAB_SIZE = 40


@dataclass
class FakeRequest:
    params: SamplingParams
    prompt_token_ids: list[int] = field(default_factory=list)
    output_token_ids: list[int] = field(default_factory=list)
    stop_token_ids: frozenset[int] = frozenset()
    generator: Any = None

    @property
    def needs_min_tokens(self) -> bool:
        return len(self.output_token_ids) < self.params.min_tokens


def slow_processed(logits: list[float], request: FakeRequest) -> list[float]:
    """Logits after bias and penalties, by loops."""
    params, out = request.params, list(logits)
    for token, bias in (params.logit_bias or {}).items():
        out[token] += max(-100.0, min(100.0, bias))
    if request.needs_min_tokens:
        for token in request.stop_token_ids:
            out[token] = -math.inf
    for token in range(len(out)):
        if token in request.prompt_token_ids or token in request.output_token_ids:
            r = params.repetition_penalty
            out[token] = out[token] / r if out[token] > 0 else out[token] * r
        count = request.output_token_ids.count(token)
        out[token] -= params.frequency_penalty * count
        out[token] -= params.presence_penalty * (count > 0)
    return out


def slow_support(logits: list[float], params: SamplingParams) -> set[int]:
    """Tokens that may be drawn, by sorting one list."""
    scaled = [x / params.temperature for x in logits]

    def softmax(values: dict[int, float]) -> dict[int, float]:
        peak = max(values.values())
        exps = {t: math.exp(v - peak) for t, v in values.items()}
        total = sum(exps.values())
        return {t: e / total for t, e in exps.items()}

    kept = {t: v for t, v in enumerate(scaled) if v > -math.inf}
    probs = softmax(kept)
    kept = {t: kept[t] for t, p in probs.items() if p >= params.min_p * max(probs.values())}
    ranked = sorted(kept, key=lambda t: -kept[t])
    if params.top_k > 0:
        ranked = ranked[: params.top_k]
    probs = softmax({t: kept[t] for t in ranked})
    support, mass = set(), 0.0
    for token in ranked:
        if support and mass >= params.top_p:
            break
        support.add(token)
        mass += probs[token]
    return support


tokens = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=12)
sampling = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([-1, 0, 1, 3, 17, 400]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.4]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.8]),
    presence_penalty=st.sampled_from([0.0, -1.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -0.3]),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 39), st.floats(-150, 150), max_size=3),
    min_tokens=st.integers(0, 10),
    seed=st.none() | st.integers(0, 5),
)
requests_strategy = st.lists(
    st.builds(
        FakeRequest,
        params=sampling,
        prompt_token_ids=tokens,
        output_token_ids=tokens,
        stop_token_ids=st.frozensets(st.integers(0, 39), max_size=3),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=150, deadline=None)
@given(requests=requests_strategy, seed=st.integers(0, 10**6))
def test_batched_equals_one_at_a_time(requests: list[FakeRequest], seed: int) -> None:
    logits = torch.randn(len(requests), VOCAB_SIZE, generator=torch.manual_seed(seed)) * 3
    processed = apply_penalties(apply_bias(logits, requests), requests)
    chosen = Sampler(seed, torch.device("cpu")).sample(logits, requests).token_ids
    for row, request in enumerate(requests):
        slow = slow_processed(logits[row].tolist(), request)
        torch.testing.assert_close(processed[row], torch.tensor(slow), atol=1e-4, rtol=1e-4)
        exact = processed[row].tolist()
        if request.params.is_greedy:
            assert exact[chosen[row]] == max(exact)
        else:
            assert chosen[row] in slow_support(exact, request.params)


@settings(max_examples=60, deadline=None)
@given(top_k=st.integers(1, 45), top_p=st.sampled_from([0.1, 0.6, 0.95]), seed=st.integers(0, 999))
def test_filters_keep_what_transformers_keeps(top_k: int, top_p: float, seed: int) -> None:
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(3, VOCAB_SIZE, generator=torch.manual_seed(seed)) * 3
    ours = apply_top_k_top_p(logits, [top_k] * 3, [top_p] * 3)
    theirs = TopPLogitsWarper(top_p)(None, TopKLogitsWarper(top_k)(None, logits))
    assert torch.equal(ours, theirs)
    assert torch.equal(apply_min_p(logits, [0.1] * 3), MinPLogitsWarper(0.1)(None, logits))


def test_repetition_penalty_is_that_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(1, VOCAB_SIZE, generator=torch.manual_seed(0))
    request = FakeRequest(SamplingParams(repetition_penalty=1.7), [3, 4, 4], [9, 3])
    theirs = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[3, 4, 4, 9, 3]]), logits)
    torch.testing.assert_close(apply_penalties(logits, [request]), theirs)


def test_a_seeded_request_draws_the_same_whatever_else_is_in_the_batch() -> None:
    logits = torch.randn(4, VOCAB_SIZE, generator=torch.manual_seed(0))
    params = SamplingParams(seed=7)

    def draw(batch: list[FakeRequest], rows: list[int]) -> list[int]:
        sampler = Sampler(len(batch), torch.device("cpu"))
        return [sampler.sample(logits[rows], batch).token_ids[0] for _ in range(20)]

    alone = draw([FakeRequest(params)], [2])
    crowd = draw(
        [FakeRequest(params), *(FakeRequest(SamplingParams()) for _ in "abc")], [2, 0, 1, 3]
    )
    assert alone == crowd


def test_draws_follow_the_probabilities() -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    batch = [FakeRequest(SamplingParams()) for _ in range(20000)]
    drawn = Sampler(0, torch.device("cpu")).sample(probs.log().expand(len(batch), 4), batch)
    frequencies = torch.bincount(torch.tensor(drawn.token_ids), minlength=4) / len(batch)
    torch.testing.assert_close(frequencies, probs, atol=0.015, rtol=0)


def test_logprobs_are_those_of_the_model_before_any_processing() -> None:
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.manual_seed(1))
    request = FakeRequest(SamplingParams(temperature=0, logprobs=3, logit_bias={5: 100.0}))
    output = Sampler(0, torch.device("cpu")).sample(logits, [request])
    expected = torch.log_softmax(logits[0], dim=-1)
    row = output.logprobs[0]
    assert row is not None
    assert output.token_ids == [5]
    assert row.sampled == pytest.approx(expected[5].item())
    assert row.sampled_rank == int((expected > expected[5]).sum()) + 1
    assert row.top_token_ids == expected.topk(3).indices.tolist()


def test_logits_are_not_changed() -> None:
    logits = torch.randn(2, VOCAB_SIZE, generator=torch.manual_seed(1))
    before = logits.clone()
    params = SamplingParams(presence_penalty=1.0, top_k=3, min_tokens=2, logit_bias={1: 2.0})
    batch = [FakeRequest(params, [1], [2], frozenset({3})) for _ in range(2)]
    Sampler(0, torch.device("cpu")).sample(logits, batch)
    assert torch.equal(logits, before)


def test_all_logprobs_cover_the_vocabulary() -> None:
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.manual_seed(1))
    output = Sampler(0, torch.device("cpu")).sample(
        logits, [FakeRequest(SamplingParams(temperature=0, logprobs=-1))]
    )
    row = output.logprobs[0]
    assert row is not None
    assert sorted(row.top_token_ids) == list(range(VOCAB_SIZE))
    assert sum(math.exp(x) for x in row.top_logprobs) == pytest.approx(1.0, abs=1e-5)
