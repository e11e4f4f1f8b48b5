"""Tool calls: forced ones by constrained decoding, free ones found in the text."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from flexinfer import RequestError
from flexinfer.async_llm import AsyncLLM
from flexinfer.engine.inputs import InputProcessor
from flexinfer.server.api.tools import ToolUse
from flexinfer.server.chat_renderer import ChatPrompt, ChatRenderer, with_tools_in_words
from flexinfer.server.parsing.pieces import read_whole
from flexinfer.server.parsing.tool_formats import tool_format
from flexinfer.server.protocol.chat import Function, Message, NamedToolChoice, Tool
from helpers.serving import MODEL
from helpers.tiny_models import make_tokenizer

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
        first, *rest = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
        reason = chunks[-1].choices[0].finish_reason
        assert {call.index for call in (first, *rest)} == {0}
        assert len(rest) > 2  # in pieces
        assert {call.id for call in rest} == {None}
        name, arguments = first.function.name, "".join(c.function.arguments for c in rest)
    else:
        (call,), reason = got.choices[0].message.tool_calls, got.choices[0].finish_reason
        name, arguments = call.function.name, call.function.arguments
    assert reason == "tool_calls"
    assert name == "weather"
    check_weather(arguments)


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


def test_documents_go_to_a_template_that_has_a_place_for_them() -> None:
    """One that has none refuses them: tests of fields."""
    template = "{% for d in documents %}{{ d.text }}{% endfor %}{{ messages[0].content }}"
    tokenizer = make_tokenizer(template)
    renderer = ChatRenderer(InputProcessor(tokenizer, len(tokenizer), 1000), None)
    chat = [Message(role="user", content=" hello")]
    ids = asyncio.run(renderer.render(ChatPrompt(chat, documents=[{"text": "world"}])))
    assert tokenizer.decode(ids) == "world hello"


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
    parser = tool_format("hermes").make({"clock": {}})
    assert [call.name for call in read_whole(parser, said["content"]).calls] == ["clock"]
    assert (answer["role"], "noon" in answer["content"]) == ("user", True)


def test_a_tool_is_a_function_unless_it_says_otherwise() -> None:
    """As vLLM and SGLang have it, whose clients leave the type out."""
    assert Tool.model_validate({"function": {"name": "clock"}}).type == "function"
    assert NamedToolChoice.model_validate({"function": {"name": "clock"}}).type == "function"
    with pytest.raises(ValueError, match="Input should be 'function'"):
        Tool.model_validate({"type": "custom", "function": {"name": "clock"}})


def test_a_list_of_calls_may_be_bounded_to_one() -> None:
    tool = Tool(type="function", function=Function(name="clock"))
    structure = ToolUse((tool,), required=True, parallel=False).structure
    assert structure is not None
    assert json.loads(structure.source)["maxItems"] == 1


def test_a_required_call_that_is_cut_off_is_no_text(client: openai.OpenAI) -> None:
    for max_tokens in (1, 4, 12):
        choice = client.chat.completions.create(
            model=MODEL,
            messages=CHAT,
            tools=[WEATHER],
            tool_choice="required",
            max_completion_tokens=max_tokens,
        ).choices[0]
        assert not choice.message.content
        assert choice.finish_reason == "length"


def forced(client: openai.OpenAI, **function: Any) -> Any:
    tool: Any = {"type": "function", "function": {"name": "f", **function}}
    call = (
        client.chat.completions.create(
            model=MODEL,
            messages=CHAT,
            tools=[CLOCK, tool],
            tool_choice={"type": "function", "function": {"name": "f"}},
            max_completion_tokens=200,
        )
        .choices[0]
        .message.tool_calls
    )
    assert call
    return json.loads(call[0].function.arguments)


def one_key(*values: int) -> dict[str, Any]:
    properties = {"a": {"enum": list(values)}}
    return {
        "type": "object",
        "properties": properties,
        "required": ["a"],
        "additionalProperties": False,
    }


LOOSE = {"oneOf": [one_key(1), one_key(1, 2)]}


@pytest.mark.parametrize(
    "schema",
    [
        LOOSE,
        {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 2},
        {"enum": ["x"], "type": "string", "format": "slug"},
    ],
)
def test_what_no_grammar_holds_is_left_out_unless_strict(
    client: openai.OpenAI, schema: dict[str, Any]
) -> None:
    parameters = {"type": "object", "properties": {"v": schema}, "required": ["v"]}
    parameters["additionalProperties"] = False
    assert list(forced(client, parameters=parameters)) == ["v"]
    with pytest.raises(openai.BadRequestError) as caught:
        forced(client, parameters=parameters, strict=True)
    error = caught.value.body
    assert isinstance(error, dict)
    assert "the parameters of the tool 'f'" in error["message"]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("forced_by", ["a name", "required"])
def test_arguments_have_no_properties_but_those_named(
    llm: AsyncLLM, strict: bool, forced_by: str
) -> None:
    inner = {"type": "object", "properties": {"v": {"enum": [1]}}, "required": ["v"]}
    outer = {"type": "object", "properties": {"o": inner}, "required": ["o"]}
    tool = Tool(type="function", function=Function(name="f", parameters=outer, strict=strict))
    named = forced_by == "a name"
    structure = ToolUse((tool,), forced="f" if named else None, required=not named).structure
    assert structure is not None
    before, after = ("", "") if named else ('[{"name":"f","arguments":', "}]")
    good, *bad = (
        before + arguments + after
        for arguments in ('{"o":{"v":1}}', '{"o":{"v":1},"z":1}', '{"o":{"v":1,"z":1}}')
    )
    tokenizer = llm.get_tokenizer()
    llm.grammars.check(structure, tokenizer.encode(good, add_special_tokens=False))
    for text in bad:
        with pytest.raises(RequestError, match="does not allow there"):
            llm.grammars.check(structure, tokenizer.encode(text, add_special_tokens=False))


def test_harmonys_forced_calls_have_closed_arguments() -> None:
    class Marks:
        def call(self, schemas: dict[str, Any]) -> str:
            assert schemas["f"]["additionalProperties"] is False
            assert schemas["f"]["properties"]["o"]["additionalProperties"] is False
            return 'start: "called"'

    inner = {"type": "object", "properties": {"v": {"enum": [1]}}}
    outer = {"type": "object", "properties": {"o": inner}}
    tool = Tool(type="function", function=Function(name="f", parameters=outer))
    marks: Any = Marks()
    structure = ToolUse((tool,), required=True, harmony=marks).structure
    assert structure is not None
    assert structure.grammar == 'start: "called"'
