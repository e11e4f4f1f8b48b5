"""Tool calls: forced ones by constrained decoding, free ones found in the text."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexinfer.server.api.tools import HermesParser, ToolUse
from flexinfer.server.chat_renderer import with_tools_in_words
from flexinfer.server.protocol.chat import Function, Tool
from helpers.serving import MODEL

CHAT: Any = [{"role": "user", "content": "What is the weather?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}


def check_weather(arguments: str) -> None:
    given = json.loads(arguments)
    assert given["city"] in ("Paris", "Rome")
    assert given["days"] in (1, 2, 3)


def test_a_named_function_is_called(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(
        model=MODEL,
        messages=CHAT,
        tools=[WEATHER, CLOCK],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        max_completion_tokens=200,
    ).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "weather"
    check_weather(call.function.arguments)


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_call_is_made(client: openai.OpenAI, stream: bool) -> None:
    got: Any = client.chat.completions.create(
        model=MODEL,
        messages=CHAT,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        max_completion_tokens=200,
        stream=stream,
    )
    if stream:
        chunks = list(got)
        calls = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
        reason = chunks[-1].choices[0].finish_reason
        assert [call.index for call in calls] == [0]
    else:
        calls, reason = got.choices[0].message.tool_calls, got.choices[0].finish_reason
    assert reason == "tool_calls"
    assert calls[0].function.name == "weather"
    check_weather(calls[0].function.arguments)


def test_the_answer_of_a_tool_goes_back_to_the_model(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function"}
    arguments = json.dumps({"city": "Rome", "days": 1})
    messages: Any = [
        *CHAT,
        {
            "role": "assistant",
            "tool_calls": [{**call, "function": {"name": "weather", "arguments": arguments}}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[WEATHER], max_completion_tokens=10
    )
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_no_choice_means_no_tools(client: openai.OpenAI) -> None:
    def num_prompt_tokens(**fields: Any) -> int:
        usage = client.chat.completions.create(
            model=MODEL, messages=CHAT, max_completion_tokens=2, **fields
        ).usage
        assert usage is not None
        return usage.prompt_tokens

    plain = num_prompt_tokens()
    assert num_prompt_tokens(tools=[CLOCK], tool_choice="none") == plain
    assert num_prompt_tokens(tools=[CLOCK]) > plain


def test_an_unknown_function_can_not_be_forced(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL,
            messages=CHAT,
            tools=[CLOCK],
            tool_choice={"type": "function", "function": {"name": "weather"}},
        )
    assert caught.value.param == "tool_choice"


def test_a_response_calls_a_function(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **WEATHER["function"], "strict": True}
    with client.responses.stream(
        model=MODEL, input="Weather?", tools=[tool], tool_choice="required", max_output_tokens=200
    ) as stream:
        for _ in stream:
            pass
        (item,) = [i for i in stream.get_final_response().output if i.type == "function_call"][:1]
    check_weather(item.arguments)


def read(pieces: list[str]) -> tuple[str, list[tuple[str, Any]]]:
    parser = HermesParser({"clock", "weather"})
    parsed = [*map(parser.feed, pieces), parser.finish()]
    calls = [c.function for part in parsed for c in part.calls]
    content = "".join(part.content for part in parsed)
    return content, [(call.name, json.loads(call.arguments)) for call in calls]


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "<Rome>"}}\n</tool_call>'
TEXT = f"Let me see < 3. {CALL}\n{CALL}Done <tool_call>no JSON</tool_call> <tool"


@given(st.lists(st.integers(0, len(TEXT)), max_size=12))
def test_calls_are_found_however_the_text_is_cut(cuts: list[int]) -> None:
    edges = sorted({0, len(TEXT), *cuts})
    pieces = [TEXT[a:b] for a, b in pairwise(edges)]
    content, calls = read(pieces)
    assert content == "Let me see < 3. Done <tool_call>no JSON</tool_call> <tool"
    assert calls == [("weather", {"city": "<Rome>"})] * 2


def test_a_call_without_its_end_mark_counts() -> None:
    assert read(['<tool_call>{"name": "clock"}']) == ("", [("clock", {})])
    assert read(['<tool_call>{"name": "unknown"}'])[1] == []


def test_a_template_without_tools_gets_them_in_words() -> None:
    call = {"function": {"name": "clock", "arguments": {}}}
    chat = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "noon", "tool_call_id": "1"},
    ]
    tools = [Tool(type="function", function=Function(name="clock")).model_dump(exclude_none=True)]
    system, question, said, answer = with_tools_in_words(chat, tools)
    assert '{"name": "clock"}' in system["content"]
    assert question["content"] == "When?"
    assert HermesParser({"clock"}).feed(said["content"]).calls
    assert (answer["role"], "noon" in answer["content"]) == ("user", True)


def test_a_list_of_calls_may_be_bounded_to_one() -> None:
    tool = Tool(type="function", function=Function(name="clock"))
    structure = ToolUse((tool,), required=True, parallel=False).structure
    assert structure is not None
    assert json.loads(structure.source)["maxItems"] == 1
