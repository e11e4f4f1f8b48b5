"""What is proposed, and how much of it: look-up, acceptance, costs, and the choice of all three."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

import pytest

pytest.importorskip("torch")

from flexinfer import LLM, SamplingParams
from flexinfer.config import EngineConfig
from flexinfer.scheduler.scheduler import Batch
from flexinfer.speculation.acceptance import Acceptance
from flexinfer.speculation.ngram import NgramIndex
from flexinfer.speculation.speculation import Speculation
from flexinfer.speculation.step_costs import MAX_AGE, MIN_STEPS, StepCosts
from flexinfer.speculative_config import SpeculativeConfig
from helpers.engine_kit import make_engine, submit

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2}


def looked_up(tokens: list[int], shortest: int, longest: int, num_tokens: int) -> list[int]:
    """By searching from the end."""
    for length in range(longest, shortest - 1, -1):
        for place in range(len(tokens) - 1, length - 1, -1):
            if tokens[place - length : place] == tokens[len(tokens) - length :]:
                found = list(tokens)
                for i in range(num_tokens):
                    found.append(found[place + i])
                return found[len(tokens) :]
    return []


@pytest.mark.parametrize("lengths", [(1, 1), (1, 3), (2, 4), (5, 5)])
def test_the_latest_place_of_the_longest_tail_is_found(lengths: tuple[int, int]) -> None:
    rng = random.Random(1)
    for num_kinds in (2, 5, 30):
        index, tokens = NgramIndex(*lengths), [rng.randrange(num_kinds) for _ in range(40)]
        for _ in range(30):
            assert index.propose(tokens, 6) == looked_up(tokens, *lengths, 6)
            tokens += [rng.randrange(num_kinds) for _ in range(rng.randrange(1, 4))]


def test_what_is_accepted_raises_the_rates_and_what_is_not_lowers_them() -> None:
    good, bad = Acceptance(), Acceptance()
    for _ in range(20):
        good.observe(4, 4)
        bad.observe(4, 0)
    assert good.probabilities(3)[2] > 0.9
    assert bad.probabilities(1)[0] < 0.1


def test_a_proposal_that_is_not_verified_is_compared_with_what_comes() -> None:
    acceptance, verified = Acceptance(), Acceptance()
    acceptance.guess([1, 2, 3, 4])
    for token in (1, 2, 9, 9):
        acceptance.observe_token(token)
    verified.observe(4, 2)
    assert acceptance.probabilities(3) == verified.probabilities(3)


def test_costs_are_lines_between_measurements_that_are_not_too_old() -> None:
    costs = StepCosts()
    assert costs.estimate(2, 4) is None
    for _ in range(MIN_STEPS):
        costs.observe(2, 0, 100.0)
        costs.observe(2, 4, 180.0)
    estimate = costs.estimate(2, 6)
    assert estimate is not None
    assert estimate[:5] == pytest.approx([100, 120, 140, 160, 180])
    assert estimate[6] > estimate[5] > 180
    assert costs.estimate(3, 4) is None
    for _ in range(MAX_AGE + 1):
        costs.observe(2, 0, 100.0)
    estimate = costs.estimate(2, 4)
    assert estimate is not None
    assert estimate[4] < 180


def test_of_the_last_steps_the_median_counts() -> None:
    costs = StepCosts()
    for us in (900.0, 100.0, 100.0, 900.0, 102.0, 101.0, 900.0):
        costs.observe(1, 0, us)
        costs.observe(1, 2, us + 10)
    assert costs.estimate(1, 2) == pytest.approx([102, 107, 112])
    for _ in range(3):
        costs.observe(1, 0, 200.0)
    assert costs.estimate(1, 0) == [200]


def speculate(
    num_requests: int,
    row_us: float,
    *,
    is_right: bool,
    steps: int = 40,
    slow: Collection[int] = (),
    slow_factor: float = 100,
) -> list[int]:
    """Further rows of each step, where a step takes 100 us and `row_us` for each of them, and
    `slow_factor` times as long for those that are `slow`."""
    engine = make_engine(speculative_config=NGRAM, max_num_seqs=8, kv_cache_memory_bytes="8MiB")
    prompts = [[i, 7, 8] * 10 for i in range(num_requests)]
    submit(engine, prompts, SamplingParams(temperature=0, max_tokens=90))
    engine.step()
    speculation, found = engine._speculation, []
    assert isinstance(speculation, Speculation)
    for request in engine.scheduler.running.values():
        request.token_ids += [7, 8]
        request.num_computed_tokens = request.num_launched_tokens = request.num_tokens - 1
    for step in range(steps):
        batch = Batch(items=engine.scheduler.schedule().items)
        speculation.draft(batch)
        found.append(sum(len(item.draft) for item in batch.items))
        tokens = []
        for item in batch.items:
            drawn = [*(item.draft or item.request.token_ids[-3:-2]), 7] if is_right else [300]
            tokens += [(item.request, token) for token in drawn]
        speculation.settle(batch, tokens)
        speculation.observe((100 + found[-1] * row_us) * (slow_factor if step in slow else 1))
    engine.close()
    return found


@pytest.mark.parametrize(
    ("num_requests", "row_us", "is_right", "pays"),
    [
        (1, 5.0, True, True),
        (1, 5.0, False, False),
        (1, 200.0, True, False),
        (8, 2.0, True, True),
        (8, 40.0, True, False),
    ],
)
def test_speculation_goes_on_only_where_it_pays(
    num_requests: int, row_us: float, is_right: bool, pays: bool
) -> None:
    rows = speculate(num_requests, row_us, is_right=is_right)
    assert rows[0] == 0  # a step without is measured first
    last = rows[-20:]
    assert min(last) == 4 * num_requests if pays else max(last) == 0


@pytest.mark.parametrize("row_us", [5.0, 200.0])
@pytest.mark.parametrize("slow", [{0}, {1}, {2}, {3}, {18}, {1, 18}])
def test_a_step_that_something_else_delays_decides_nothing(slow: set[int], row_us: float) -> None:
    """The first steps are without proposals, those after them the first with some."""
    rows = speculate(1, row_us, is_right=True, slow=slow)[-20:]
    assert min(rows) == 4 if row_us < 100 else max(rows) == 0


def test_steps_without_are_measured_again_where_little_is_gained() -> None:
    """The first of them, after prompts, take longer than later ones: 1/125 < 5/500."""
    rows = speculate(1, 100.0, is_right=True, slow={0, 1}, slow_factor=1.25)
    assert max(rows[2:8]) == 4
    assert max(rows[-20:]) == 0


def test_where_much_is_gained_no_step_goes_without() -> None:
    assert min(speculate(1, 5.0, is_right=True, slow={0, 1}, slow_factor=1.2)[8:]) == 4


def test_what_gains_hardly_anything_is_left() -> None:
    """5 / 493 is more than 1 / 100, by 1.4 %."""
    assert max(speculate(1, 98.25, is_right=True)[-20:]) == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"method": "eagle", "num_speculative_tokens": 2},
            "one of 'ngram', 'draft_model', got 'eagle'",
        ),
        ({"method": "eagle"}, "one of 'ngram', 'draft_model', got 'eagle'"),
        ({"method": "ngram"}, "needs num_speculative_tokens"),
        ({"num_speculative_tokens": 2}, "needs method"),
        ({**NGRAM, "num_speculative_tokens": 0}, "num_speculative_tokens must be a positive"),
        (
            {**NGRAM, "num_speculative_tokens": 257},
            "num_speculative_tokens must be at most 256, got",
        ),
        ({**NGRAM, "prompt_lookup_min": 3}, r"prompt_lookup_min \(3\) must be at most"),
        ({**NGRAM, "prompt_lookup_max": 0}, "prompt_lookup_max must be a positive"),
        ({**NGRAM, "prompt_lookup_max": 33}, "prompt_lookup_max must be at most 32, got 33"),
        ({**NGRAM, "prompt_lookup_min": 200}, "prompt_lookup_min must be at most 32, got 200"),
        ({**NGRAM, "tree": 1}, "has tree, which is not supported"),
        ("{", "is no JSON"),
        ([1], "must be a mapping"),
    ],
)
def test_a_bad_configuration_is_refused_by_name(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM("no-such-folder", speculative_config=given)


def test_json_is_as_good_as_a_mapping() -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 3}'
    parsed = EngineConfig(model="m", speculative_config=text).speculation
    assert parsed == SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    assert parsed.lookup_lengths == (5, 5)


def test_asynchronous_scheduling_is_refused_with_speculation() -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        EngineConfig(model="m", speculative_config=NGRAM, async_scheduling=True)
