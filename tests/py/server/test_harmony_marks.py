"""What is said of Harmony's tokens: where prompts leave off, which are reasoning, what may come."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexinfer.server.parsing.harmony_marks import HarmonyMarks
from helpers.harmony import harmony_tokenizer
from helpers.tiny_models import make_tokenizer

TOKENIZER = harmony_tokenizer()
MARKS = HarmonyMarks(TOKENIZER)
ASKED = "<|start|>user<|message|>Hi<|end|>"
BEGIN = "<|start|>assistant"
REASONING = ["<|channel|>analysis<|message|>Hm <|end|>", "<|channel|>analysis<|message|>"]
OTHERS = [
    "<|channel|>final<|message|>analysis<|return|>",
    "<|channel|>commentary to=functions.analysis <|constrain|>json<|message|>{}<|call|>",
    "<|message|>so<|end|>",
    "so",
]


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER(text, add_special_tokens=False).input_ids
    return ids


@pytest.mark.parametrize(
    ("prompt", "opening"),
    [
        (ASKED + BEGIN, ""),
        (f"{ASKED}{BEGIN}<|channel|>final<|message|>So it", "<|channel|>final<|message|>"),
        (f"{ASKED}{BEGIN}<|channel|>analysis<|message|>", "<|channel|>analysis<|message|>"),
        (f"{ASKED}{BEGIN}<|channel|>", "<|channel|>"),
        (ASKED, ""),
        ("Hi", ""),
        ("", ""),
    ],
)
def test_the_prompt_says_what_message_is_begun(prompt: str, opening: str) -> None:
    assert MARKS.opening(ids_of(prompt)) == opening


@given(st.lists(st.sampled_from([*REASONING, *OTHERS]), max_size=6))
def test_tokens_of_reasoning_are_those_of_its_messages(messages: list[str]) -> None:
    """Each message apart is the reference; what is cut off or not ended belongs to its own."""
    texts = [messages[0], *(BEGIN + text for text in messages[1:])] if messages else []
    expected = sum(
        len(ids_of(text))
        for text, message in zip(texts, messages, strict=True)
        if message in REASONING
    )
    assert MARKS.num_reasoning_tokens(ids_of("".join(texts)), "") == expected


def test_reasoning_that_the_prompt_has_opened_counts() -> None:
    ids = ids_of(f"Hm<|end|>{BEGIN}{OTHERS[0]}")
    assert MARKS.num_reasoning_tokens(ids, "<|channel|>analysis<|message|>") == 3
    assert MARKS.num_reasoning_tokens(ids, "<|channel|>final<|message|>") == 0


@pytest.mark.parametrize(
    ("opening", "is_call", "first"),
    [
        ("", False, "analysis* "),
        ("", True, "analysis*\n"),
        ("<|channel|>analysis<|message|>", False, "rest analysis* "),
        ("<|channel|>final<|message|>", True, "rest analysis*\n"),
        ("<|channel|>final<|message|>", False, None),
    ],
)
def test_a_structure_comes_behind_what_is_open(
    opening: str, is_call: bool, first: str | None
) -> None:
    rules: Any = MARKS.before_answer(opening, is_call=is_call)
    assert rules is None if first is None else rules.startswith(f"before: {first}")


def test_a_tokenizer_without_the_marks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the token '<\|start\|>', which the model's tokenizer"):
        HarmonyMarks(make_tokenizer())
    with pytest.raises(ValueError, match="Harmony needs a tokenizer"):
        HarmonyMarks(None)
