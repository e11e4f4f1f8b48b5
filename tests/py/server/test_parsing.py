"""Reasoning and tool calls in a model's text: each family's own form, however the text is cut."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexinfer.server.parsing.json_calls import ForcedCall, RequiredCalls
from flexinfer.server.parsing.pieces import Answer, CallArguments, Parser, read_whole
from flexinfer.server.parsing.reasoning import (
    FORMS,
    HARMONY,
    ReasoningParser,
    check_reasoning_parser,
    opened_by,
    reasoning_form,
)
from flexinfer.server.parsing.tool_formats import TOOL_FORMATS, tool_format

SCHEMAS: dict[str, Any] = {
    "weather": {
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "tags": {"anyOf": [{"type": "array"}, {"type": "null"}]},
        }
    },
    "clock": {},
}
JSON = '{"city": "Ro]}me", "days": 2}'
ROME = ("weather", {"city": "Ro]}me", "days": 2})
CLOCK: tuple[str, Any] = ("clock", {})

CASES = {
    "hermes": [
        (
            'Let me see < 3. <tool_call>\n{"name": "weather", '
            f'"arguments": {JSON}}}\n</tool_call>\n'
            '<tool_call>{"name": "clock"}</tool_call>Done <tool_call>no JSON</tool_call> <tool',
            "Let me see < 3. Done <tool_call>no JSON</tool_call> <tool",
            [ROME, CLOCK],
        ),
        ('\n<tool_call>{"name": "clock", "arguments": {}}', "", [CLOCK]),
        ('<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', None, []),
        ('<tool_call>{"name": ["clock"]}</tool_call>', None, []),
        ('<tool_call>{"arguments": {}, "name": "clock"}</tool_call>', "", [CLOCK]),
        ('<tool_call>{"name": "clock", "arguments": "{}"}</tool_call> so', "so", [CLOCK]),
        (" plain\n", None, []),
    ],
    "llama3_json": [
        (f'{{"name": "weather", "parameters": {JSON}}}', "", [ROME]),
        (
            f'<|python_tag|>{{"name": "clock", "parameters": {{}}}}; '
            f'{{"type": "function", "name": "weather", "parameters": {JSON}}}',
            "",
            [CLOCK, ROME],
        ),
        ('{"answer": 1}', None, []),
        ("So {x} is", None, []),
    ],
    "mistral": [
        (f'[TOOL_CALLS] [{{"name": "weather", "arguments": {JSON}}}, {{"name": "clock"}}]', "", 2),
        (f"Hm [TOOL_CALLS]weather[ARGS]{JSON}[TOOL_CALLS]clock{{}}", "Hm ", 2),
        ("[TOOL_CALLS]unknown[ARGS]{}", None, []),
    ],
    "deepseek_v3": [
        (
            "So<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
            f"```json\n{JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
            "clock\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "So",
            2,
        )
    ],
    "deepseek_v31": [
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
            f"{JSON}<｜tool▁call▁end｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>{{}}"
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "",
            2,
        )
    ],
    "kimi_k2": [
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
            f"<|tool_call_argument_begin|>{JSON}<|tool_call_end|><|tool_call_begin|>"
            "functions.clock:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
            "<|tool_calls_section_end|>",
            "",
            2,
        )
    ],
    "granite": [
        (f'<|tool_call|>[{{"name": "weather", "arguments": {JSON}}}, {{"name": "clock"}}]', "", 2)
    ],
    "internlm": [
        (
            f'So <|action_start|><|plugin|>\n{{"name": "weather", "parameters": {JSON}}}'
            "<|action_end|>\n",
            "So ",
            [ROME],
        )
    ],
    "jamba": [
        (
            f'<tool_calls>[\n{{"name": "weather", "arguments": {JSON}}},\n'
            '{"name": "clock", "arguments": {}}\n]</tool_calls>',
            "",
            2,
        )
    ],
    "phi4_mini_json": [
        (f'functools[{{"name": "weather", "arguments": {JSON}}}, {{"name": "clock"}}]', "", 2),
        ("func tools", None, []),
    ],
    "qwen3_coder": [
        (
            "I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nRo]}me\n</parameter>\n"
            "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n"
            "<tool_call>\n<function=clock>\n</function>\n</tool_call>\nSo.",
            "I look.\nSo.",
            2,
        ),
        (
            "<function=weather><parameter=tags>[1, 2]</parameter>"
            "<parameter=city>a </function> b</parameter></function>",
            "",
            [("weather", {"tags": [1, 2], "city": "a </function> b"})],
        ),
        ("<tool_call>\n<function=unknown>\n</function>\n</tool_call>", None, []),
        ("<tool_call>none", None, []),
    ],
    "glm45": [
        (
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Ro]}me</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n"
            "<tool_call>clock</tool_call>",
            "",
            2,
        )
    ],
    "minimax_m2": [
        (
            '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Ro]}me'
            '</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n'
            '<invoke name="clock">\n</invoke>\n</minimax:tool_call>',
            "",
            2,
        )
    ],
    "pythonic": [
        ('[weather(city="Ro]}me", days=2), clock()]', "", 2),
        ("[weather(tags=[true, null])]", "", [("weather", {"tags": [True, None]})]),
        ("[1] says", None, []),
        ("[__import__('os').system('ls')]", None, []),
        ("Hello [x]", None, []),
    ],
    "openai": [
        (
            f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{JSON}"
            "<|call|><|start|>assistant to=functions.clock<|channel|>commentary<|message|>",
            "",
            2,
        )
    ],
    "llama4_pythonic": [("<|python_start|>[clock()]<|python_end|>", "", [CLOCK])],
}
SAME = {"gpt-oss": "openai", "llama4_json": "llama3_json", "qwen3_xml": "qwen3_coder"}
ALL = [(name, *case) for name in TOOL_FORMATS for case in CASES[SAME.get(name, name)]]


def read(parser: Parser, text: str, cuts: list[int]) -> Answer:
    answer = Answer()
    for a, b in pairwise(sorted({0, len(text), *cuts})):
        answer.add(parser.feed(text[a:b]))
    answer.add(parser.finish())
    return answer


def calls_of(answer: Answer) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


@pytest.mark.parametrize(("name", "text", "content", "calls"), ALL)
def test_each_form_is_read(name: str, text: str, content: str | None, calls: Any) -> None:
    """`content` None: the text as it is; `calls` 2: the weather in Rome, and the clock."""
    answer = read_whole(tool_format(name).make(SCHEMAS), text)
    assert answer.content == (text if content is None else content)
    assert calls_of(answer) == ([ROME, CLOCK] if calls == 2 else calls)


@pytest.mark.parametrize(("name", "text"), [case[:2] for case in ALL])
@settings(max_examples=20)
@given(data=st.data())
def test_a_text_says_the_same_however_it_is_cut(name: str, text: str, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    end = data.draw(st.integers(0, len(text)))  # as max_tokens does
    make = tool_format(name).make
    assert read(make(SCHEMAS), text[:end], cuts) == read_whole(make(SCHEMAS), text[:end])
    assert read(make(SCHEMAS), text, list(range(len(text)))) == read_whole(make(SCHEMAS), text)


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
@given(st.lists(st.sampled_from([*'<>/{}[]=":,t \n', "<tool_call>", "</tool_call>", "<function="])))
def test_what_is_no_call_is_not_lost(name: str, parts: list[str]) -> None:
    text = "".join(parts)
    answer = read_whole(tool_format(name).make(SCHEMAS), text)
    assert answer.content == text


@pytest.mark.parametrize("schema", [{"properties": []}, {"properties": {"a": {"anyOf": [1]}}}])
def test_a_schema_that_is_none_makes_texts(schema: dict[str, Any]) -> None:
    text = "<function=f><parameter=a>1</parameter></function>"
    answer = read_whole(tool_format("qwen3_coder").make({"f": schema}), text)
    assert calls_of(answer) == [("f", {"a": "1"})]


def test_arguments_come_in_pieces() -> None:
    parser = tool_format("hermes").make(SCHEMAS)
    parser.feed('<tool_call>{"name": "weather", "argu')
    shown = [parser.feed(text) for text in ('ments": {"ci', 'ty": "Rome"', "}}</tool_call>")]
    assert CallArguments('{"ci') in shown[0]
    assert shown[1:] == [[CallArguments('ty": "Rome"')], [CallArguments("}")]]


def test_a_forced_call_is_the_whole_text() -> None:
    answer = read(ForcedCall("clock"), '{"a": 1}', [3, 5])
    assert calls_of(answer) == [("clock", {"a": 1})]
    assert [call.name for call in read_whole(ForcedCall("clock"), "").calls] == ["clock"]


@given(st.integers(0, 90))
def test_required_calls_never_show_as_text(end: int) -> None:
    text = f'[{{"name": "weather", "arguments": {JSON}}}, {{"name": "clock", "arguments": {{}}}}]'
    answer = read(RequiredCalls(SCHEMAS), text[:end], [3])
    assert answer.content == ""
    sure = [text.index(JSON), text.index("{}")]
    assert len(answer.calls) == sum(end > place for place in sure)


REASONED = [
    ("<think>\nLet me < see.\n\n</think>\n\nHi.\n", "Let me < see.", "Hi.\n"),
    ("\n<think></think>Hi", "", "Hi"),
    ("Hi <think>there</think>", "", "Hi <think>there</think>"),
    ("<think>cut off\n", "cut off", ""),
    ("<thi", "", "<thi"),
]


@pytest.mark.parametrize(("text", "reasoning", "content"), REASONED)
@given(cuts=st.lists(st.integers(0, 40), max_size=8))
def test_reasoning_is_apart(text: str, reasoning: str, content: str, cuts: list[int]) -> None:
    for one in ([cut for cut in cuts if cut < len(text)], list(range(len(text)))):
        answer = read(ReasoningParser(FORMS["qwen3"], None, None), text, one)
        assert (answer.reasoning, answer.content) == (reasoning, content)


@pytest.mark.parametrize("cuts", [[], list(range(70))])
def test_a_call_after_reasoning_is_found_and_one_within_is_not(cuts: list[int]) -> None:
    call = '<tool_call>{"name": "clock"}</tool_call>'
    parser = ReasoningParser(FORMS["deepseek_r1"], True, tool_format("hermes").make(SCHEMAS))
    answer = read(parser, f"say {call}?</think>\n{call}", cuts)
    assert answer.reasoning == f"say {call}?"
    assert (answer.content, calls_of(answer)) == ("", [CLOCK])


@pytest.mark.parametrize(
    ("name", "prompt", "is_open"),
    [
        ("qwen3", "<|im_start|>assistant\n", None),
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("deepseek_r1", "<｜Assistant｜>", True),
        ("deepseek_r1", "<｜Assistant｜></think>", False),
    ],
)
def test_the_prompt_says_where_a_text_begins(name: str, prompt: str, is_open: bool | None) -> None:
    assert opened_by(reasoning_form(name), prompt) is is_open


def test_unknown_names_are_refused_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match=r"'x'; there are deepseek_v3, .*hermes"):
        tool_format("x")
    with pytest.raises(ValueError, match=r"'x'; there are .*qwen3"):
        reasoning_form("x")
    with pytest.raises(ValueError, match="'granite' is not served: sentences in place of tags"):
        check_reasoning_parser("granite")
    for name in HARMONY:
        check_reasoning_parser(name)
