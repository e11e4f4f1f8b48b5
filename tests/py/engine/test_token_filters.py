"""Allowed tokens and bad words hold in every decoding mode, against transformers' generate."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer import SamplingParams
from helpers.engine_kit import TOKEN_BYTES, drain, make_engine, submit
from helpers.tiny_models import VOCAB_SIZE, make_model, random_prompts, reference

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2}
PROMPTS = random_prompts((20, 33, 7))
NUM_NEW = 16
ALLOWED = [*range(VOCAB_SIZE // 3), *range(VOCAB_SIZE // 2, VOCAB_SIZE)]


@cache
def bad_words() -> list[list[int]]:
    """What the model would say: single tokens and pairs of each answer."""
    said = [reference("llama", tuple(prompt), NUM_NEW) for prompt in PROMPTS]
    return [word for tokens in said for word in (tokens[2:4], tokens[5:6], tokens[8:11])]


class OneByOne:
    """As a logits processor of transformers, by loops."""

    def __init__(self, num_prompt: int) -> None:
        self._num_prompt = num_prompt

    def __call__(self, input_ids: Any, scores: torch.Tensor) -> torch.Tensor:
        output = input_ids[0, self._num_prompt :].tolist()
        out = torch.full_like(scores, -torch.inf)
        for token in ALLOWED:
            if all([*output, token][-len(word) :] != word for word in bad_words()):
                out[0, token] = scores[0, token]
        return out


@cache
def expected(prompt: tuple[int, ...]) -> list[int]:
    output = make_model("llama").generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=NUM_NEW,
        logits_processor=[OneByOne(len(prompt))],
    )
    found: list[int] = output[0, len(prompt) :].tolist()
    return found


def filtered(**fields: Any) -> SamplingParams:
    given = {"temperature": 0, "max_tokens": NUM_NEW, "ignore_eos": True, **fields}
    return SamplingParams(allowed_token_ids=ALLOWED, bad_words_token_ids=bad_words(), **given)


@pytest.mark.parametrize(
    ("settings", "preempted"),
    [
        ({}, 0.0),
        ({"speculative_config": NGRAM}, 0.0),
        ({"async_scheduling": True}, 0.0),
        ({"max_num_batched_tokens": 8, "kv_cache_memory_bytes": 90 * TOKEN_BYTES}, 0.2),
    ],
    ids=["plain", "speculative", "asynchronous", "preempted"],
)
def test_tokens_are_those_of_transformers(settings: dict[str, Any], preempted: float) -> None:
    engine = make_engine(**settings)
    submit(engine, PROMPTS, filtered())
    final = drain(engine, random.Random(0), preempted)
    engine.close()
    for i, prompt in enumerate(PROMPTS):
        tokens = final[str(i)].outputs[0].token_ids
        assert tokens == expected(tuple(prompt))
        assert tokens != reference("llama", tuple(prompt), NUM_NEW)


def test_each_of_several_samples_keeps_to_them() -> None:
    """And an answer that was begun elsewhere goes on as it would have."""
    engine = make_engine()
    params = filtered(n=4, temperature=1.0, seed=3)
    engine.add_request("n", PROMPTS[0], params)
    for output in drain(engine)["n"].outputs:
        tokens = output.token_ids
        assert set(tokens) <= set(ALLOWED)
        for word in bad_words():
            assert word not in [tokens[i : i + len(word)] for i in range(len(tokens))]
    whole = expected(tuple(PROMPTS[0]))
    begun: Any = {"prompt_token_ids": PROMPTS[0], "output_token_ids": whole[:5]}
    engine.add_request("begun", begun, filtered())
    assert drain(engine)["begun"].outputs[0].token_ids == whole
    engine.close()


def test_a_request_without_a_token_left_ends_alone() -> None:
    engine = make_engine()
    nothing = SamplingParams(allowed_token_ids=[5], bad_words_token_ids=[[5]])
    engine.add_request("nothing", PROMPTS[0], nothing)
    engine.add_request("fine", PROMPTS[1], filtered())
    final = drain(engine)
    engine.close()
    assert final["nothing"].outputs[0].finish_reason == "error"
    assert "leave no token" in str(final["nothing"].outputs[0].stop_reason)
    assert final["fine"].outputs[0].token_ids == expected(tuple(PROMPTS[1]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids names token"),
        ({"bad_words_token_ids": [[1, VOCAB_SIZE]]}, "bad_words names token"),
        ({"bad_words": ["a"]}, "bad_words need a tokenizer"),
    ],
)
def test_tokens_beyond_the_vocabulary_are_refused(fields: dict[str, Any], message: str) -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match=message):
        engine.add_request("x", PROMPTS[0], SamplingParams(**fields))
    engine.close()
