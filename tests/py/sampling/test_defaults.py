"""SamplingDefaults: what a request has for what it leaves out."""

from __future__ import annotations

from typing import Any

import pytest

from flexinfer.sampling.defaults import SamplingDefaults
from flexinfer.sampling.params import SamplingParams

ADVISED = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 40}


def test_what_is_given_takes_the_place_of_openais_defaults() -> None:
    made = SamplingDefaults.of(
        {**ADVISED, "min_p": 0.1, "repetition_penalty": 1.05}, is_limit=False
    )
    assert made.params() == SamplingParams(
        temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.05, max_tokens=40
    )


def test_none_and_names_that_are_not_of_sampling_are_passed_over() -> None:
    given = {"temperature": None, "do_sample": False, "eos_token_id": 2, "max_length": 20}
    made = SamplingDefaults.of(given, is_limit=False)
    assert (made.params(), bool(made)) == (SamplingParams(), False)


@pytest.mark.parametrize("value", [0, -1])
def test_top_k_may_be_off(value: int) -> None:
    assert SamplingDefaults.of({"top_k": value}, is_limit=False).params().top_k == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-1, "hot", True, [1], float("nan"))),
        *(("top_p", value) for value in (0, 1.5)),
        *(("top_k", value) for value in (-2, 1.5)),
        ("min_p", 2),
        ("repetition_penalty", 0),
        *(("max_new_tokens", value) for value in (0, -1, "64", 1.5)),
    ],
)
def test_what_no_request_may_have_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingDefaults.of({name: value}, is_limit=False)


@pytest.mark.parametrize(
    ("is_limit", "asked", "expected"),
    [(False, 100, 100), (True, 100, 40), (True, 10, 10), (True, None, None), (True, 0, 0)],
)
def test_a_limit_bounds_what_requests_ask_for(
    is_limit: bool, asked: int | None, expected: int | None
) -> None:
    assert SamplingDefaults.of(ADVISED, is_limit=is_limit).limited(asked) == expected


def test_they_are_told_as_people_write_them() -> None:
    made = SamplingDefaults.of(ADVISED, is_limit=False)
    assert str(made) == "temperature 0.6, top_p 0.95, top_k 20, max_tokens 40"
