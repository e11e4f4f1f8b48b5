"""The batched sampler against a slow one that does a sequence at a time, and transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st

from flexinfer import SamplingParams
from flexinfer.sampling import sampler as sampler_module
from flexinfer.sampling.random import derive_seed, uniforms
from flexinfer.sampling.sampler import (
    Sampler,
    apply_min_p,
    apply_penalties,
    apply_top_k_top_p,
    choose,
    choose_by_torch,
)
from flexinfer.sampling.sequences import SequenceSetup, SequenceState, SequenceStates

torch.set_num_threads(1)
VOCAB_SIZE = 40


def make_state(
    params: SamplingParams,
    prompt_token_ids: Sequence[int] = (),
    output_token_ids: Sequence[int] = (),
    stop_token_ids: frozenset[int] = frozenset(),
    seed: int = 0,
) -> SequenceState:
    """A sequence without a seed has the one given."""
    states = SequenceStates(seed)
    setup = SequenceSetup(
        sampling_id=0,
        params=params,
        num_prompt_tokens=len(prompt_token_ids),
        prompt_token_ids=tuple(prompt_token_ids),
        output_token_ids=tuple(output_token_ids),
        stop_token_ids=stop_token_ids,
    )
    states.add([setup])
    states[0].num_output_tokens = len(output_token_ids)
    return states[0]


def slow_processed(logits: list[float], state: SequenceState) -> list[float]:
    """Logits after bias and penalties, by loops."""
    params, setup, out = state.params, state.setup, list(logits)
    for token, bias in (params.logit_bias or {}).items():
        out[token] += max(-100.0, min(100.0, bias))
    if state.needs_min_tokens:
        for token in setup.stop_token_ids:
            out[token] = -math.inf
    for token in range(len(out)):
        if token in setup.prompt_token_ids or token in state.output_token_ids:
            r = params.repetition_penalty
            out[token] = out[token] / r if out[token] > 0 else out[token] * r
        count = state.output_token_ids.count(token)
        out[token] -= params.frequency_penalty * count
        out[token] -= params.presence_penalty * (count > 0)
    for token in range(len(out)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            out[token] = -math.inf
    for word in params.bad_words_token_ids or ():
        *before, last = word
        if not before or state.output_token_ids[-len(before) :] == before:
            out[last] = -math.inf
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
tokens |= st.lists(st.integers(0, 3), max_size=12)  # of which bad words are made
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
    allowed_token_ids=st.none() | st.lists(st.integers(0, 39), min_size=25),
    bad_words_token_ids=st.none()
    | st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=8),
    seed=st.none() | st.integers(0, 5),
)
states_strategy = st.lists(
    st.builds(
        make_state,
        params=sampling,
        prompt_token_ids=tokens,
        output_token_ids=tokens,
        stop_token_ids=st.frozensets(st.integers(0, 39), max_size=3),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=150, deadline=None)
@given(states=states_strategy, seed=st.integers(0, 10**6))
def test_batched_equals_one_at_a_time(states: list[SequenceState], seed: int) -> None:
    logits = torch.randn(len(states), VOCAB_SIZE, generator=torch.manual_seed(seed)) * 3
    sampler = Sampler(seed, torch.device("cpu"))
    processed = sampler._process(logits, states)
    chosen = sampler.sample(logits, states).token_ids
    by_torch = choose_by_torch(processed, states).tolist()
    for row, state in enumerate(states):
        slow = slow_processed(logits[row].tolist(), state)
        torch.testing.assert_close(processed[row], torch.tensor(slow), atol=1e-4, rtol=1e-4)
        exact = processed[row].tolist()
        if state.params.is_greedy:
            assert exact[chosen[row]] == exact[by_torch[row]] == max(exact)
        else:
            assert {chosen[row], by_torch[row]} <= slow_support(exact, state.params)


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
    state = make_state(SamplingParams(repetition_penalty=1.7), [3, 4, 4], [9, 3])
    theirs = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[3, 4, 4, 9, 3]]), logits)
    torch.testing.assert_close(apply_penalties(logits, [state]), theirs)


def test_a_sequence_draws_the_same_whatever_else_is_in_the_batch() -> None:
    logits = torch.randn(4, VOCAB_SIZE, generator=torch.manual_seed(0))
    sampler = Sampler(0, torch.device("cpu"))

    def token_at(length: int, rows: list[int]) -> int:
        batch = [make_state(SamplingParams(seed=7), output_token_ids=[0] * length)]
        batch += [make_state(SamplingParams(top_k=5), seed=row) for row in rows[1:]]
        return sampler.sample(logits[rows], batch).token_ids[0]

    alone = [token_at(length, [2]) for length in range(20)]
    assert alone == [token_at(length, [2, 0, 1, 3]) for length in range(20)]
    assert len(set(alone)) > 3


@pytest.mark.parametrize("vocab_size", [4, 50, 3000])
def test_draws_follow_the_probabilities(vocab_size: int) -> None:
    """Chi-squared over rows of different seeds, and over the tokens of one sequence."""
    num_draws = 20000
    weights = torch.rand(vocab_size, generator=torch.manual_seed(3)) ** 3
    weights[::7] = 0
    probs = weights / weights.sum()
    rows = [make_state(SamplingParams(), seed=seed) for seed in range(num_draws)]
    tokens = [make_state(SamplingParams(seed=5)) for _ in range(num_draws)]
    for position, state in enumerate(tokens):
        state.num_output_tokens = position
    for batch, method in ((rows, choose), (tokens, choose), (tokens, choose_by_torch)):
        drawn = method(probs.log().expand(num_draws, -1), batch)
        counts = torch.bincount(torch.as_tensor(drawn), minlength=vocab_size).double()
        assert counts[::7].sum() == 0
        usual = probs * num_draws >= 5
        expected = torch.cat([probs[usual], probs[~usual].sum()[None]]).double() * num_draws
        found = torch.cat([counts[usual], counts[~usual].sum()[None]])
        kept = expected > 0
        statistic = ((found - expected)[kept] ** 2 / expected[kept]).sum().item()
        num_free = int(kept.sum()) - 1
        assert statistic < num_free + 4 * math.sqrt(2 * num_free) + 8  # beyond 4 sigma


def test_the_last_token_with_a_probability_is_the_last_that_can_be_drawn() -> None:
    logits = torch.full((1, VOCAB_SIZE), -math.inf)
    logits[0, 3:9] = torch.tensor([0.1, 1.0, 0.3, 2.0, 0.7, -1.0])
    params = SamplingParams(temperature=0.7)
    with pytest.MonkeyPatch.context() as patch:
        for number, expected in ((0.0, 3), (1 - 2.0**-24, 8), (1.0, 8)):
            patch.setattr(sampler_module, "uniforms", lambda *_, number=number: [number])
            states = [make_state(params)]
            assert choose_by_torch(logits, states).tolist() == [expected]
            if number < 1:
                assert choose(logits, states) == [expected]


def test_logprobs_are_those_of_the_model_before_any_processing() -> None:
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.manual_seed(1))
    state = make_state(SamplingParams(temperature=0, logprobs=3, logit_bias={5: 100.0}))
    output = Sampler(0, torch.device("cpu")).sample(logits, [state])
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
    batch = [make_state(params, [1], [2], frozenset({3})) for _ in range(2)]
    Sampler(0, torch.device("cpu")).sample(logits, batch)
    assert torch.equal(logits, before)


def test_all_logprobs_cover_the_vocabulary() -> None:
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.manual_seed(1))
    output = Sampler(0, torch.device("cpu")).sample(
        logits, [make_state(SamplingParams(temperature=0, logprobs=-1))]
    )
    row = output.logprobs[0]
    assert row is not None
    assert sorted(row.top_token_ids) == list(range(VOCAB_SIZE))
    assert sum(math.exp(x) for x in row.top_logprobs) == pytest.approx(1.0, abs=1e-5)


def test_random_numbers_are_those_of_splitmix64() -> None:
    """In plain integers, whatever the size of seed and counter."""
    mask = 2**64 - 1

    def mix(value: int) -> int:
        value &= mask
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & mask
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB & mask
        return value ^ (value >> 31)

    assert mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # the first of seed 0, as published
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 12345, derive_seed(7, 3)]
    counters = [0, 1, 2**31, 99999, 0, 7, 1]
    found = uniforms(seeds, counters)
    assert found == [
        (mix(mix(seed) + 0x9E3779B97F4A7C15 * (counter + 1)) >> 40) / 2**24
        for seed, counter in zip(seeds, counters, strict=True)
    ]
    assert uniforms([], []) == []


def test_each_token_has_a_random_number_of_its_own() -> None:
    """Over equal logits the numbers are the tokens."""
    logits = torch.zeros(1, VOCAB_SIZE)
    state = make_state(SamplingParams(seed=7))
    drawn = []
    for state.num_output_tokens in range(20):
        drawn += choose(logits, [state])
    assert len(set(drawn)) > 8


def test_sequences_without_a_seed_draw_different_numbers() -> None:
    states = SequenceStates(seed=0)
    setups = [SequenceSetup(i, SamplingParams(), num_prompt_tokens=1) for i in range(20)]
    states.add(setups)
    assert len({states[i].seed for i in range(20)}) == 20
    assert len(set(choose(torch.zeros(20, VOCAB_SIZE), [states[i] for i in range(20)]))) > 8


@pytest.mark.parametrize("by", [choose, choose_by_torch])
def test_a_temperature_that_float32_has_not_makes_tokens_equal(
    by: Callable[..., list[int]],
) -> None:
    logits = torch.tensor([[1.0, 0.0, -math.inf]])
    params = SamplingParams(temperature=1e39, min_p=0.5)
    drawn = {int(by(logits, [make_state(params, seed=seed)])[0]) for seed in range(40)}
    assert drawn == {0, 1}


@pytest.mark.parametrize(
    "fields", [{"allowed_token_ids": [1, 2]}, {"bad_words_token_ids": [[7]]}, {"top_k": 2}]
)
def test_a_nan_makes_its_row_fail_where_it_is_forbidden_too(fields: dict[str, Any]) -> None:
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[1, 7] = math.nan
    states = [make_state(SamplingParams(**fields)) for _ in range(2)]
    output = Sampler(0, torch.device("cpu")).sample(logits, states)
    assert output.token_ids[0] >= 0
    assert output.token_ids[1] == -1
    assert output.errors == {1: "the model computed logits that are NaN or infinite"}


@pytest.mark.parametrize("by", [choose, choose_by_torch])
def test_min_p_holds_for_the_probabilities_at_the_temperature(by: Callable[..., list[int]]) -> None:
    """Second token: 0.37 as probable as the first, and 0.82 as probable at a temperature of 5."""
    logits = torch.tensor([[1.0, 0.0, -50.0]])
    params = SamplingParams(temperature=5.0, min_p=0.6)
    drawn = {int(by(logits, [make_state(params, seed=seed)])[0]) for seed in range(40)}
    assert drawn == {0, 1}
