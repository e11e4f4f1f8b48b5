"""Prompts of later turns extend the token ids of the turns before, whatever the model said."""

from __future__ import annotations

from typing import Any

import pytest

from flexinfer.engine.history import (
    History,
    PlainFormat,
    choose_format,
    common_prefix,
    system_message,
)
from helpers.harmony import harmony_tokenizer
from helpers.tiny_models import make_tokenizer

END = frozenset({1})
HIDES_ANSWERS = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<s>{{ m['content'] }}</s>{% endif %}"
    "{% endfor %}<s>"
)
NO_SYSTEM_ROLE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}<s>assistant: "
)


def history(tokenizer: Any, system: str | None = "Be kind.") -> History:
    return History(choose_format(tokenizer), system_message(system), END)


def says(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def test_the_first_prompt_is_that_of_the_template() -> None:
    tokenizer = make_tokenizer()
    prompt = history(tokenizer).ask("Hi")
    assert tokenizer.decode(prompt) == "<s>system: Be kind.</s><s>user: Hi</s><s>assistant: "


@pytest.mark.parametrize(
    ("said", "seen"),
    [
        ("Hello</s>", "Hello</s>"),
        ("Hello", "Hello</s>"),  # cut short: the template's end of turn is appended
        ("He\ufffdllo", "He\ufffdllo</s>"),
        ("", "</s>"),
    ],
)
def test_the_next_prompt_extends_what_the_model_saw(said: str, seen: str) -> None:
    tokenizer = make_tokenizer()
    talk = history(tokenizer)
    prompt = talk.ask("Hi")
    talk.answer(prompt, says(tokenizer, said), said.removesuffix("</s>"))
    before = list(talk.token_ids)
    following = talk.ask("And you?")
    assert following[: len(before)] == before
    assert tokenizer.decode(following).endswith(
        f"<s>assistant: {seen}<s>user: And you?</s><s>assistant: "
    )
    assert talk.num_new_tokens == len(following) - len(before)


def test_tokens_that_text_would_not_give_back_are_kept() -> None:
    tokenizer = make_tokenizer()
    talk = history(tokenizer)
    prompt = talk.ask("Hi")
    letters = [says(tokenizer, letter)[0] for letter in "hello"]  # not how "hello" tokenizes
    assert letters != says(tokenizer, "hello")
    talk.answer(prompt, [*letters, 1], "hello")
    following = talk.ask("More")
    assert following[: len(talk.token_ids)] == talk.token_ids
    assert talk.num_rewritten == 0


def test_a_template_that_hides_answers_is_rendered_anew_and_counted() -> None:
    tokenizer = make_tokenizer(HIDES_ANSWERS)
    talk = history(tokenizer, None)
    talk.answer(talk.ask("Hi"), [5, 6, 7], "abc")
    talk.ask("More")
    assert talk.num_rewritten == 1


THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (f"{THOUGHT}<|channel|>final<|message|>Hello\n<|return|>", "Hello\n"),
        ("<|channel|>final<|message|>Hello", "Hello"),  # cut short
        ("<|channel|>analysis<|message|>Hm", ""),
        ("<|channel|>anal", ""),
        ("<|channel|>final <|constrain|>json<|message|>{}<|return|>", "{}"),
        # The template refuses marks within a message.
        ("<|channel|>final<|message|>A<|channel|>final<|message|>B", "A\nB"),
        ("Hello", "Hello"),
        ("Hello<|return|>", "Hello"),
    ],
)
@pytest.mark.parametrize("has_marks", [False, True])
def test_harmony_keeps_the_final_message_alone(said: str, kept: str, has_marks: bool) -> None:
    """As gpt-oss was trained: what it thought of turns that are over is not read again."""
    tokenizer = harmony_tokenizer()
    talk = history(tokenizer)
    prompt = talk.ask("Hi")
    ids = says(tokenizer, said)
    talk.answer(prompt, ids, tokenizer.decode(ids, skip_special_tokens=not has_marks))
    assert talk.messages[-1]["content"] == kept
    following = talk.ask("And you?")
    assert following[: len(prompt)] == prompt  # its KV is found again
    assert tokenizer.decode(following[len(prompt) :]) == (
        f"<|channel|>final<|message|>{kept}<|end|><|start|>user<|message|>And you?<|end|>"
        "<|start|>assistant"
    )
    assert talk.num_rewritten == (said != f"<|channel|>final<|message|>{kept}")


def test_a_template_without_system_role_gets_it_in_the_first_message() -> None:
    tokenizer = make_tokenizer(NO_SYSTEM_ROLE)
    assert "user: Be kind.\n\nHi" in tokenizer.decode(history(tokenizer).ask("Hi"))


def test_plain_text_extends_too() -> None:
    tokenizer = make_tokenizer(None)
    talk = history(tokenizer)
    prompt = talk.ask("Hi")
    assert isinstance(choose_format(tokenizer), PlainFormat)
    assert tokenizer.decode(prompt) == "Be kind.\n\nUser: Hi\nAssistant:"
    talk.answer(prompt, says(tokenizer, " Hello"), "Hello")
    before = list(talk.token_ids)
    following = talk.ask("More")
    assert following[: len(before)] == before
    assert tokenizer.decode(following).endswith("Assistant: Hello\nUser: More\nAssistant:")


def test_an_unanswered_question_can_be_taken_back() -> None:
    talk = history(make_tokenizer())
    first = talk.ask("Hi")
    talk.take_back()
    assert talk.ask("Hi") == first


def test_turns_are_taken_back_one_by_one() -> None:
    tokenizer = make_tokenizer()
    talk = history(tokenizer)
    first = talk.ask("Hi")
    talk.answer(first, says(tokenizer, "Hello</s>"), "Hello")
    second = talk.ask("And you?")
    talk.answer(second, says(tokenizer, "Well</s>"), "Well")
    assert talk.take_back() == "And you?"
    assert talk.ask("And you?") == second
    assert [talk.take_back(), talk.take_back(), talk.take_back()] == ["And you?", "Hi", None]
    assert (talk.token_ids, len(talk.messages)) == ([], 1)


def test_branches_do_not_see_each_other() -> None:
    tokenizer = make_tokenizer()
    talk = history(tokenizer)
    talk.answer(talk.ask("Hi"), says(tokenizer, "Hello</s>"), "Hello")
    fork = talk.fork()
    fork.answer(fork.ask("Why?"), says(tokenizer, "So</s>"), "So")
    assert len(talk.messages) == 3
    assert fork.take_back() == "Why?"
    assert fork.token_ids == talk.token_ids
    assert fork.take_back() == "Hi"


@pytest.mark.parametrize(
    ("first", "second", "length"), [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2], [1, 3], 1)]
)
def test_common_prefix(first: list[int], second: list[int], length: int) -> None:
    assert common_prefix(first, second) == length
