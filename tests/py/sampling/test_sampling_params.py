"""SamplingParams: what is refused names the field, the value and what is allowed."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flexinfer import BeamSearchParams, SamplingParams
from flexinfer.sampling.params import NOT_SERVED

BAD = [
    ("n", 0),
    ("n", 1.5),
    ("best_of", 0),
    ("n", True),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("min_p", -0.01),
    ("min_p", 1.01),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", 1e-320),
    ("repetition_penalty", 1e7),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("seed", 1.0),
    ("seed", 2**64),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("min_tokens", -1),
    ("logprobs", -2),
    ("prompt_logprobs", -2),
    ("stop", [""]),
    ("stop", [3]),
    ("stop_token_ids", [-1]),
    ("logit_bias", {-1: 0.0}),
    ("logit_bias", {1: math.nan}),
    ("output_kind", 1),
    ("stop", 3),
    ("stop", {"a": 1}),
    ("stop_token_ids", 3),
    ("stop_token_ids", [[1]]),
    ("stop_token_ids", "ab"),
    ("allowed_token_ids", [None]),
    ("logit_bias", [1]),
    ("logit_bias", {"5": 1.0}),
    ("logit_bias", {1: None}),
    ("bad_words", 3),
    ("bad_words_token_ids", [3]),
    ("bad_words_token_ids", [[]]),
    ("ignore_eos", "no"),
    ("detokenize", None),
    ("skip_special_tokens", 3),
    ("temperature", 10**400),
    ("temperature", None),
    ("n", None),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_bad_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(("field", "value"), [*BAD, ("min_tokens", 17), ("extra_args", {"a": 1})])
def test_an_assignment_is_refused_as_the_value_would_be(field: str, value: Any) -> None:
    params = SamplingParams(seed=3)
    with pytest.raises(ValueError, match=field) as at_once:
        SamplingParams(**{"seed": 3, field: value})
    with pytest.raises(ValueError, match=field) as later:
        setattr(params, field, value)
    assert str(later.value) == str(at_once.value)
    assert params == SamplingParams(seed=3)


def test_an_assignment_brings_what_follows_from_it() -> None:
    params = SamplingParams()
    params.stop, params.stop_token_ids, params.max_tokens = "x", [np.int64(3)], 5
    assert params == SamplingParams(stop="x", stop_token_ids=[3], max_tokens=5)
    assert (params.stop_strings, params.stop_ids) == (("x",), {3})
    for copied in (params.clone(), copy.copy(params), pickle.loads(pickle.dumps(params))):
        copied.max_tokens = 7
        assert (copied.max_tokens, params.max_tokens) == (7, 5)


@pytest.mark.parametrize("name", ["max_new_tokens", "stop_ids", "is_greedy"])
def test_what_is_no_field_cannot_be_assigned(name: str) -> None:
    with pytest.raises(AttributeError, match=f"no field '{name}'"):
        setattr(SamplingParams(), name, 1)


def test_params_of_a_beam_search_can_be_assigned() -> None:
    params = BeamSearchParams(beam_width=2)
    params.max_tokens = 3
    assert params == BeamSearchParams(beam_width=2, max_tokens=3)
    with pytest.raises(ValueError, match="beam_width must be at least 1, got 0"):
        params.beam_width = 0


def test_a_list_that_is_changed_is_seen_in_a_copy() -> None:
    params = SamplingParams(stop=["a"], stop_token_ids=[3])
    params.stop.append("b")  # type: ignore[union-attr]
    params.stop_token_ids.append(4)  # type: ignore[union-attr]
    copied = params.clone()
    assert (copied.stop_strings, copied.stop_ids) == (("a", "b"), {3, 4})
    params.stop_token_ids.append(-4)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="stop_token_ids must hold token ids"):
        params.clone()


def test_a_seed_of_minus_one_is_none() -> None:
    params = SamplingParams(seed=-1)
    assert params.seed is None
    params.seed = 4
    params.seed = -1
    assert params.seed is None


def test_each_sample_keeps_a_seed_where_minus_one_would_be_one() -> None:
    params = SamplingParams(n=4, seed=-3)
    assert [params.of_sample(index).seed for index in range(4)] == [-3, -2, 0, 1]


def test_true_asks_for_one_log_probability() -> None:
    params = SamplingParams(logprobs=True, prompt_logprobs=True)
    assert (params.logprobs, params.prompt_logprobs) == (1, 1)
    assert type(params.logprobs) is int


def test_none_is_the_default_where_params_are_optional() -> None:
    given: Any = dict.fromkeys(["n", "temperature", "top_p", "presence_penalty", "stop", "top_k"])
    biases = {"3": 1.5, 4: -1}
    made = SamplingParams.from_optional(**given, max_tokens=None, logit_bias=biases, min_p=0.5)
    assert made == SamplingParams(max_tokens=None, logit_bias={3: 1.5, 4: -1.0}, min_p=0.5)
    with pytest.raises(ValueError, match="a token id must be an integer, got 'x'"):
        SamplingParams.from_optional(logit_bias={"x": 1.0})


def test_numbers_of_numpy_mean_what_pythons_mean() -> None:
    params = SamplingParams(
        max_tokens=np.int64(5),
        temperature=np.float32(0.5),
        seed=np.uint8(3),
        ignore_eos=np.True_,
        stop_token_ids=np.array([7, 8]),
        allowed_token_ids=[np.int32(4)],
        bad_words_token_ids=[np.array([1, 2])],
        logit_bias={np.int64(6): np.float32(1)},
    )
    assert params == SamplingParams(
        max_tokens=5,
        temperature=0.5,
        seed=3,
        ignore_eos=True,
        stop_token_ids=[7, 8],
        allowed_token_ids=[4],
        bad_words_token_ids=[[1, 2]],
        logit_bias={6: 1.0},
    )
    assert BeamSearchParams(beam_width=np.int64(2)) == BeamSearchParams(beam_width=2)


@pytest.mark.parametrize(
    ("field", "value"), [("beam_width", "2"), ("early_stopping", 1), ("ignore_eos", 3)]
)
def test_bad_value_of_a_beam_search_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{field} must be"):
        BeamSearchParams(**{"beam_width": 2, field: value})


def test_negative_max_tokens_message_gives_value_and_range() -> None:
    with pytest.raises(ValueError, match=r"max_tokens must be at least 1, got -5"):
        SamplingParams(max_tokens=-5)


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"min_tokens \(5\) must be at most max_tokens \(4\)"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_stop_strings_without_text_are_refused() -> None:
    with pytest.raises(ValueError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (1.0, 1.0, 0, 16)


@pytest.mark.parametrize("stop", ["ab", ["ab"], ("ab",)])
def test_stop_may_be_one_string_or_many(stop: Any) -> None:
    assert SamplingParams(stop=stop).stop_strings == ("ab",)


def test_a_copy_with_changes_is_checked_too() -> None:
    params = SamplingParams(stop_token_ids=[3])
    assert replace(params, max_tokens=2).stop_ids == {3}
    with pytest.raises(ValueError, match="top_p"):
        replace(params, top_p=7.0)


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (1e-6, True), (0.1, False)])
def test_tiny_temperature_is_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy is greedy


def test_each_sample_has_a_seed_of_its_own() -> None:
    params = SamplingParams(n=3, seed=5)
    assert [params.of_sample(index).seed for index in range(3)] == [5, 6, 7]


def test_what_vllm_has_beside_is_taken_where_it_says_nothing_else() -> None:
    params = SamplingParams(
        spaces_between_special_tokens=True,
        flat_logprobs=False,
        skip_reading_prefix_cache=False,
        **dict.fromkeys(list(NOT_SERVED)[3:]),  # type: ignore[arg-type]
    )
    assert params == SamplingParams()
    assert params.clone() == params
    assert params.extra_args is None


@pytest.mark.parametrize("name", NOT_SERVED)
def test_what_vllm_has_beside_is_refused_with_what_to_do(name: str) -> None:
    given: Any = {name: not NOT_SERVED[name][0]}
    with pytest.raises(ValueError, match=rf"{name}=.* is not served here: \w+"):
        SamplingParams(**given)
