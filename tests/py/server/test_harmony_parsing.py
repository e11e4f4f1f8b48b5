"""Harmony's messages: what each is, how damaged ones are read, and that cuts change nothing."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexinfer.server.parsing import harmony
from flexinfer.server.parsing.harmony import ENDS, IN_HEADER, MARK, HarmonyParser
from flexinfer.server.parsing.pieces import (
    Answer,
    CallArguments,
    CallStart,
    Content,
    Reasoning,
    read_whole,
)

NAMES = {"weather", "clock", "web.find"}
THINK = "<|channel|>analysis<|message|>Let me < see.<|end|>"
NEXT = "<|start|>assistant"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}'
FINAL = "<|channel|>final<|message|>It's **sunny**.\n"
ROME = ("weather", {"city": "Rome"})
CLOCK: tuple[str, Any] = ("clock", {})

WHOLE = [
    (f"{THINK}{NEXT}{FINAL}<|return|>", "Let me < see.", "It's **sunny**.\n", []),
    (f"{THINK}{NEXT}{CALL}<|call|>", "Let me < see.", "", [ROME]),
    (f"{FINAL}", "", "It's **sunny**.\n", []),
    # What the model tells the user before it calls.
    (
        f"{THINK}{NEXT}<|channel|>commentary<|message|>I look.<|end|>{NEXT}{CALL}<|call|>",
        "Let me < see.",
        "I look.",
        [ROME],
    ),
    (
        f"<|channel|>commentary<|message|>Wait.<|end|>{NEXT}{FINAL}",
        "",
        "Wait.\nIt's **sunny**.\n",
        [],
    ),
    (f"{THINK}{NEXT}{THINK}{NEXT}{FINAL}", "Let me < see.\nLet me < see.", "It's **sunny**.\n", []),
    (
        f"{CALL}<|call|>{NEXT} to=functions.clock<|channel|>commentary json<|message|>{{}}<|call|>",
        "",
        "",
        [ROME, CLOCK],
    ),
    ("<|channel|>analysis to=functions.clock code<|message|>{}<|call|>", "", "", [CLOCK]),
    ("<|channel|>commentary to=functions.web.find<|message|>{}", "", "", [("web.find", {})]),
    ("<|channel|>commentary to=clock<|message|> \n<|call|>", "", "", [CLOCK]),
]
DAMAGED = [
    ("", "", ""),
    (" Hello\n", "", " Hello\n"),
    ("Hello <|user|> a <|b <| c <", "", "Hello <|user|> a <|b <| c <"),
    ("final answer: 42", "", "final answer: 42"),
    ("analysis " * 20, "", "analysis " * 20),
    (f"So. {FINAL}", "", "So. \nIt's **sunny**.\n"),
    # Marks that are missing, or too many.
    ("analysis<|message|>Hm<|end|>assistantfinal<|message|>Hi", "Hm", "Hi"),
    (f"<|channel|>analysis<|message|>Hm{NEXT}<|channel|>final<|message|>Hi", "Hm", "Hi"),
    ("<|channel|>analysis<|message|>Hm<|channel|>final<|message|>Hi", "Hm", "Hi"),
    (f"{NEXT}<|channel|>final<|message|>Hi<|end|><|end|>\n\n<|return|>", "", "Hi"),
    ("<|channel|>final<|message|><|message|>H<|constrain|>i<|return|> there", "", "Hi\nthere"),
    ("<|message|>Hi", "", "Hi"),
    (f"{NEXT}<|message|>Hi", "", "Hi"),
    ("<|channel|>final Hello<|end|>", "", "Hello"),
    (f"<|channel|>final Hello{NEXT}<|message|> you", "", "Hello\n you"),
    ("<|channel|>––commentary<|message|>Hi", "", "Hi"),
    ("<|channel|>thoughts<|message|>Hi", "", "Hi"),
    ("<|channel|>analysis<|channel|>final<|message|>Hi", "", "Hi"),
    # Functions that are not there, and other recipients.
    ('<|channel|>commentary to=functions.finalise<|message|>{"a": 1}<|call|>', "", '{"a": 1}'),
    (f"{NEXT} to=functions.analysis<|message|>{{}}<|call|>", "", "{}"),
    ("<|channel|>analysis to=python code<|message|>print(1)<|call|>", "print(1)", ""),
    (
        "<|start|>functions.clock to=assistant<|channel|>commentary<|message|>noon<|end|>",
        "",
        "noon",
    ),
    # Cut by max_tokens.
    ("<|channel|>analysis<|message|>Hm <|en", "Hm <|en", ""),
    ("<|channel|>anal", "", ""),
    (f"<|channel|>analysis<|message|>Hm<|end|>{NEXT[:-3]}", "Hm", ""),
    ("<|channel|>commentary to=functions.wea", "", ""),
    ("<|channel|>commentary to=functions.weather <|constrain|>js", "", ""),
    ("<|channel|>commentary to=functions.weather js", "", ""),
]
ALL = [*WHOLE, *((*case, []) for case in DAMAGED)]
TOKENS = [
    *(*IN_HEADER, *ENDS),
    *("assistant", "analysis", "commentary", "final", " to=functions.clock", "to=", "json", "{}"),
    *("Hello", " ", "\n", "<", "<|", "<|en", "|>", '{"a"', "finalassistant", "x" * 70, " " * 70),
]
fuzzed = st.lists(st.sampled_from(TOKENS), max_size=14).map("".join)


def read(text: str, cuts: list[int], opening: str = "") -> Answer:
    parser = HarmonyParser(NAMES, opening)
    answer = Answer()
    for a, b in pairwise(sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})):
        answer.add(parser.feed(text[a:b]))
    answer.add(parser.finish())
    return answer


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), ALL)
def test_each_message_goes_where_its_header_says(
    text: str, reasoning: str, content: str, calls: Any
) -> None:
    for answer in (read_whole(HarmonyParser(NAMES), text), read(text, list(range(len(text))))):
        assert (answer.reasoning, answer.content) == (reasoning, content)
        assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == calls


@given(text=fuzzed, cuts=st.lists(st.integers(0, 200), max_size=12))
def test_any_text_says_the_same_however_it_is_cut(text: str, cuts: list[int]) -> None:
    whole = read_whole(HarmonyParser(NAMES), text)
    assert read(text, cuts) == whole
    assert read(text, list(range(len(text)))) == whole


@given(st.sampled_from(ALL), st.integers(0, 150), st.lists(st.integers(0, 150), max_size=12))
def test_so_does_an_answer_that_max_tokens_ends(case: Any, end: int, cuts: list[int]) -> None:
    assert read(case[0][:end], cuts) == read_whole(HarmonyParser(NAMES), case[0][:end])


@given(fuzzed)
def test_marks_never_show(text: str) -> None:
    answer = read_whole(HarmonyParser(NAMES), text)
    for shown in (answer.reasoning, answer.content, *(call.arguments for call in answer.calls)):
        assert not MARK.search(shown)


@given(st.lists(st.sampled_from(["Hello", " so", "<", "<|", "final", "|>", "\n"])).map("".join))
def test_text_without_marks_is_content_as_it_is(text: str) -> None:
    assert read_whole(HarmonyParser(NAMES), text).content == text


@pytest.mark.parametrize(
    "before", ["", "<|channel|>", "<|channel|>final<|message|>", f"{FINAL}<|end|>"]
)
@pytest.mark.parametrize("word", ["a < b ", "    "])
def test_no_text_is_searched_again_and_again(
    before: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each character in a few places; in each of 2,000 pieces it would be a thousand times."""
    num_chars = []

    class Counting:
        def search(self, text: str) -> Any:
            num_chars.append(len(text))
            return MARK.search(text)

    parser = HarmonyParser(NAMES)
    parser.feed(before)
    monkeypatch.setattr(harmony, "MARK", Counting())
    for _ in range(2000):
        parser.feed(word)
    assert sum(num_chars) < 20 * 2000 * len(word)


def test_pieces_come_as_soon_as_they_are_sure() -> None:
    parser = HarmonyParser(NAMES)
    texts = ["<|channel|>", "analysis", "<|message|>", "Hm", " <", "|end", "|>"]
    assert [piece for text in texts[:3] for piece in parser.feed(text)] == [Reasoning("")]
    shown = [parser.feed(text) for text in texts[3:]]
    assert shown == [[Reasoning("Hm")], [Reasoning(" ")], [], []]
    parser.feed(NEXT)
    assert parser.feed(CALL.partition("{")[0]) == [CallStart("weather")]
    assert parser.feed('{"city"') == [CallArguments('{"city"')]
    assert parser.feed(': "Rome"}<|call|>') == [CallArguments(': "Rome"}')]


@pytest.mark.parametrize(
    ("opening", "text", "pieces"),
    [
        ("<|channel|>final<|message|>", "Hi", [Content("Hi")]),
        ("<|channel|>analysis<|message|>", "Hm", [Reasoning(""), Reasoning("Hm")]),
        ("<|channel|>", "final<|message|>Hi", [Content("Hi")]),
        ("<|channel|>commentary to=functions.clock<|message|>", "{}", None),
    ],
)
def test_an_answer_goes_on_where_the_prompt_stops(opening: str, text: str, pieces: Any) -> None:
    parser = HarmonyParser(NAMES, opening)
    assert parser.feed(text) == (pieces or [CallStart("clock"), CallArguments("{}")])
