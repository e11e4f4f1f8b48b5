"""StepCosts: what a step with further rows is estimated to take."""

from __future__ import annotations

import pytest

from flexinfer.speculation.step_costs import MAX_AGE, MIN_STEPS, StepCosts, guessed_share

BASE_US = 1000.0


def measured(*steps: tuple[int, int, float]) -> StepCosts:
    """After MIN_STEPS without further rows for each number of requests, and then these: requests,
    further rows, microseconds."""
    costs = StepCosts()
    for num_requests in sorted({step[0] for step in steps}):
        for _ in range(MIN_STEPS):
            costs.observe(num_requests, 0, BASE_US)
    for step in steps:
        costs.observe(*step)
    return costs


def row_us(costs: StepCosts, num_requests: int) -> float:
    found = costs.estimate(num_requests, 10)
    assert found is not None
    assert found[0] == BASE_US
    return (found[10] - found[0]) / 10


def test_one_step_alone_is_not_believed() -> None:
    """Something else may have delayed it."""
    assert row_us(measured((32, 40, 9000.0)), 32) == BASE_US * guessed_share(32)


def test_a_guess_is_not_taken_for_what_was_seen() -> None:
    costs = measured((32, 40, 9000.0), (20, 0, BASE_US))
    row_us(costs, 32)
    assert row_us(costs, 20) == BASE_US * guessed_share(20)


def test_of_steps_of_two_sizes_the_less_steep_counts() -> None:
    assert row_us(measured((32, 40, 9000.0), (32, 64, 2280.0)), 32) == pytest.approx(20)


def test_what_is_measured_of_one_size_counts_before_single_steps_of_others() -> None:
    costs = measured((32, 4, 1200.0), (32, 4, 1200.0), (32, 40, 1040.0), (32, 64, 1064.0))
    assert row_us(costs, 32) == pytest.approx(50)


def test_rows_cost_what_they_do_with_about_as_many_requests() -> None:
    costs = measured((32, 10, 1200.0), (32, 10, 1200.0), (20, 0, BASE_US), (8, 0, BASE_US))
    assert row_us(costs, 20) == BASE_US * guessed_share(20)  # nobody has asked for those of 32
    assert row_us(costs, 32) == pytest.approx(20)
    assert row_us(costs, 20) == pytest.approx(20)
    assert row_us(costs, 8) == BASE_US * guessed_share(8)


def test_of_two_numbers_of_requests_the_nearer_counts() -> None:
    steps = [(number, 10, us) for number, us in ((16, 1100.0), (32, 1200.0)) for _ in range(2)]
    costs = measured(*steps, (28, 0, BASE_US), (20, 0, BASE_US))
    for number in (16, 32):
        row_us(costs, number)
    assert row_us(costs, 28) == pytest.approx(20)
    assert row_us(costs, 20) == pytest.approx(10)


def test_what_was_measured_long_ago_is_forgotten() -> None:
    costs = measured((32, 10, 1200.0), (32, 10, 1200.0), (20, 0, BASE_US))
    row_us(costs, 32)
    for _ in range(MAX_AGE + 1):
        costs.observe(20, 0, BASE_US)
    assert row_us(costs, 20) == BASE_US * guessed_share(20)
    assert costs.estimate(32, 10) is None
