"""Arguments of vLLM's calls: how a call's prompts are tokenized, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from flexinfer.engine.call_arguments import Tokenization, check_call_arguments
from flexinfer.engine.inputs import InputProcessor
from flexinfer.errors import RequestError


class Letters:
    """A tokenizer: a token a letter, and 0 before them."""

    truncation_side = "left"

    def get_vocab(self) -> dict[str, int]:
        return {"a": 1}

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> Any:
        ids = [0] * add_special_tokens + [ord(letter) - ord("a") + 1 for letter in text]
        return type("Encoding", (), {"input_ids": ids})


INPUTS = InputProcessor(Letters(), vocab_size=27, max_model_len=6)


@pytest.mark.parametrize(
    ("given", "prompt", "tokens"),
    [
        ({"add_special_tokens": False}, "abc", [1, 2, 3]),
        ({"truncation": True, "max_length": 2}, "abc", [2, 3]),
        ({"truncation": "longest_first"}, "abcdefg", [3, 4, 5, 6, 7]),
        ({"truncate_prompt_tokens": -1}, "abcdefg", [3, 4, 5, 6, 7]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, "abc", [0, 1]),
        ({"truncate_prompt_tokens": 2}, {"prompt_token_ids": [5, 6, 7]}, [6, 7]),
        ({"truncate_prompt_tokens": 9, "padding": False}, {"prompt": "ab"}, [0, 1, 2]),
    ],
)
def test_tokens_are_those_that_were_asked_for(
    given: dict[str, Any], prompt: Any, tokens: list[int]
) -> None:
    asked = Tokenization.of(given).tokens_of(prompt, INPUTS)
    assert INPUTS.parse(asked).token_ids == tokens


def test_ids_are_cut_and_what_else_a_prompt_has_stays() -> None:
    asked = Tokenization.of({"truncate_prompt_tokens": 1})
    assert asked.tokens_of([3, 4], INPUTS) == [4]
    found: Any = asked.tokens_of({"prompt": "ab", "cache_salt": "x"}, INPUTS)
    assert found == {"prompt": "ab", "prompt_token_ids": [2], "cache_salt": "x"}


@pytest.mark.parametrize("given", [None, {}, {"truncation": False, "add_special_tokens": None}])
def test_what_says_nothing_changes_nothing(given: Any) -> None:
    assert Tokenization.of(given).tokens_of("abc", INPUTS) == "abc"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"stride": 3}, "'stride' of tokenization_kwargs is not supported"),
        ({"padding": "longest"}, "'padding' of tokenization_kwargs"),
        ({"truncation": "only_first"}, "truncation .* must be True or False"),
        ({"max_length": 3}, "max_length of tokenization_kwargs needs truncation=True"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be at least 1"),
        ({"truncation_side": "up"}, "truncation_side must be 'left' or 'right'"),
        ({"add_special_tokens": "no"}, "add_special_tokens"),
        ("truncation", "tokenization_kwargs must be a dict"),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(given: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        Tokenization.of(given)


def test_other_arguments_may_say_nothing() -> None:
    check_call_arguments({"trace_headers": {"a": "b"}, "data_parallel_rank": 0, "kv_hints": None})
    with pytest.raises(RequestError, match="there are no images"):
        check_call_arguments({"mm_processor_kwargs": {"num_crops": 4}})
    with pytest.raises(TypeError, match="no argument 'priorty' here"):
        check_call_arguments({"priorty": 1})
