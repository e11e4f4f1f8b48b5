"""Numbers that callers give: numpy's and torch's are as good as Python's, a bool is none."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flexinfer.runtime.numbers import flag, real, whole, whole_list


@pytest.mark.parametrize("value", [5, np.int64(5), np.uint8(5), np.array(5), torch.tensor(5)])
def test_whole_numbers_become_ints(value: Any) -> None:
    assert whole("it", value) == 5
    assert type(whole("it", value)) is int


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), torch.tensor(0.5), Fraction(1, 2)])
def test_real_numbers_become_floats(value: Any) -> None:
    assert real("it", value) == 0.5
    assert type(real("it", value)) is float


@pytest.mark.parametrize(
    "value", [True, np.True_, torch.tensor(True), "5", None, 5.0, np.array([5, 6]), [5]]
)
def test_what_is_no_whole_number_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^it must be an integer, got"):
        whole("it", value)


@pytest.mark.parametrize(
    "value", [True, np.False_, "5", b"5", None, math.nan, np.float32("inf"), 10**400, np.zeros(2)]
)
def test_what_is_no_finite_number_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^it must be a finite number, got"):
        real("it", value)


@pytest.mark.parametrize("value", [torch.tensor([True]), torch.tensor([5]), np.array([5])])
def test_an_array_of_one_is_no_number(value: Any) -> None:
    """To torch it is one, a bool too."""
    for read in (whole, real):
        with pytest.raises(ValueError, match=r"^it must be"):
            read("it", value)


@pytest.mark.parametrize("value", [True, np.True_, torch.tensor(True)])
def test_flags_become_bools(value: Any) -> None:
    assert flag("it", value) is True


@pytest.mark.parametrize("value", [1, "yes", None, np.array([True])])
def test_what_is_no_flag_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^it must be True or False, got"):
        flag("it", value)


def test_lists_of_whole_numbers_come_of_sequences_and_arrays() -> None:
    for given in ([5, np.int64(6)], (5, 6), np.array([5, 6]), torch.tensor([5, 6]), range(5, 7)):
        assert whole_list("them", given) == [5, 6]
    for given in (5, "56", {5: 6}, None, np.array(5)):
        with pytest.raises(ValueError, match=r"^them must be a list of integers, got"):
            whole_list("them", given)
    with pytest.raises(ValueError, match=r"^them\[1\] must be an integer, got None"):
        whole_list("them", [5, None])
