"""allowed_token_ids and bad words: which tokens they forbid, and what they are refused for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer import SamplingParams
from flexinfer.errors import RequestError
from flexinfer.sampling.sampler import Sampler
from flexinfer.sampling.sequences import SequenceSetup, SequenceStates
from flexinfer.sampling.token_filter import MAX_BAD_WORDS, TokenFilter, with_bad_words_token_ids
from helpers.tiny_models import make_tokenizer

BAD = SamplingParams(bad_words_token_ids=[[3], [1, 2], [2, 1, 2], [7, 2]])


@pytest.mark.parametrize(
    ("output", "forbidden"),
    [([], {3}), ([1], {2, 3}), ([2, 1], {2, 3}), ([1, 7], {2, 3}), ([1, 5], {3})],
)
def test_only_the_token_that_completes_a_word_is_forbidden(
    output: list[int], forbidden: set[int]
) -> None:
    mask = TokenFilter(BAD).forbidden(output, 9)
    assert {token for token, is_forbidden in enumerate(mask) if is_forbidden} == forbidden


def test_a_word_that_was_completed_before_forbids_nothing_later() -> None:
    token_filter = TokenFilter(BAD)
    assert token_filter.forbidden([1], 9)[2]
    assert not token_filter.forbidden([1, 5], 9)[2]


def test_only_allowed_tokens_are_left_less_the_bad_words() -> None:
    params = SamplingParams(allowed_token_ids=[1, 4, 3], bad_words_token_ids=[[3], [1, 4]])
    mask = TokenFilter(params).forbidden([1], 6)
    assert mask.tolist() == [True, False, True, True, True, True]


def test_words_are_forbidden_with_a_space_before_them_and_without() -> None:
    tokenizer = make_tokenizer()
    params = with_bad_words_token_ids(SamplingParams(bad_words=["hello", "  wo"]), tokenizer)
    assert params.bad_words is None
    texts = [tokenizer.decode(ids) for ids in params.bad_words_token_ids or ()]
    assert texts == ["hello", " hello", "wo", " wo"]
    assert with_bad_words_token_ids(params, tokenizer) is params


@pytest.mark.parametrize(
    ("words", "with_tokenizer", "message"),
    [
        (["ab"], False, "bad_words need a tokenizer"),
        ([" "], True, "bad_words must have at least one token each, ' ' has none"),
        ([f"{i}" for i in range(MAX_BAD_WORDS)], True, "bad_words are 2048 sequences"),
    ],
)
def test_words_that_cannot_be_forbidden_are_refused(
    words: list[str], with_tokenizer: bool, message: str
) -> None:
    tokenizer = make_tokenizer() if with_tokenizer else None
    with pytest.raises(RequestError, match=message):
        with_bad_words_token_ids(SamplingParams(bad_words=words), tokenizer)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids must not be empty"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids must hold token ids"),
        ({"allowed_token_ids": ["a"]}, r"allowed_token_ids\[0\] must be an integer"),
        ({"bad_words": "ab"}, "bad_words must be a list of texts"),
        ({"bad_words": ["a", ""]}, "bad_words must hold non-empty strings"),
        ({"bad_words": [5]}, "bad_words must hold non-empty strings"),
        ({"bad_words_token_ids": [[]]}, "bad_words_token_ids must hold non-empty lists"),
        ({"bad_words_token_ids": [[-2]]}, r"bad_words_token_ids\[0\] must hold token ids"),
    ],
)
def test_wrong_fields_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


def states_of(*params: SamplingParams) -> list[Any]:
    states = SequenceStates(seed=0)
    states.add([SequenceSetup(i, one, num_prompt_tokens=1) for i, one in enumerate(params)])
    return [states[i] for i in range(len(params))]


def test_rows_without_a_filter_are_not_processed(monkeypatch: pytest.MonkeyPatch) -> None:
    """However large the vocabulary: theirs is read where it stands."""
    rows = []
    process = Sampler._process

    def spy(self: Sampler, logits: torch.Tensor, states: Any) -> torch.Tensor:
        rows.append(len(logits))
        return process(self, logits, states)

    monkeypatch.setattr(Sampler, "_process", spy)
    logits = torch.randn(4, 40, generator=torch.manual_seed(0))
    plain = SamplingParams(temperature=0)
    allowed = replace(plain, allowed_token_ids=[2])
    found = Sampler(0, torch.device("cpu")).sample(logits, states_of(plain, plain, allowed, plain))
    best = logits.argmax(dim=-1).tolist()
    assert found.token_ids == [best[0], best[1], 2, best[3]]
    assert rows == [1]


def test_one_sequence_that_has_no_token_left_fails_alone() -> None:
    logits = torch.randn(3, 40, generator=torch.manual_seed(0))
    nothing = SamplingParams(allowed_token_ids=[7], bad_words_token_ids=[[7]])
    states = states_of(SamplingParams(), nothing, SamplingParams(allowed_token_ids=[9]))
    found = Sampler(0, torch.device("cpu")).sample(logits, states)
    assert found.token_ids[1:] == [-1, 9]
    assert found.errors == {1: "the sampling parameters leave no token that could be chosen"}
