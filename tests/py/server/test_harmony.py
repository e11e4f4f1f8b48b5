"""gpt-oss' form at every endpoint: a real server whose model says what a test wants."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

anthropic = pytest.importorskip("anthropic")

from flexinfer.async_llm import AsyncLLM
from flexinfer.outputs import BeamSearchOutput, BeamSearchSequence
from flexinfer.server.state import ServerState
from helpers.harmony import TEMPLATE, save_harmony_model
from helpers.scripted import check_admitted, say
from helpers.serving import MODEL, make_llm, serving, settings

CHAT: Any = [{"role": "user", "content": "Is it hot in Rome?"}]
THINK = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"
LOOK = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
CALL = (
    "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Rome"}<|call|>'
)
ANSWER = f"{THINK}<|channel|>final<|message|>Hot.<|return|>"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CLOCK: Any = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "The time",
        "parameters": {"type": "object", "description": "none ::= {}"},
    },
}
TOOLS = [WEATHER, CLOCK]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    made = make_llm(model=save_harmony_model(tmp_path_factory.mktemp("gpt-oss")))
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def url(llm: AsyncLLM) -> Iterator[str]:
    """No parser is named: the template says it."""
    with serving(llm, settings()) as found:
        yield found


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, messages: Any = CHAT, **fields: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=messages, **fields)


def test_a_chat_has_reasoning_content_and_calls(
    client: openai.OpenAI, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = say(monkeypatch, llm, THINK + LOOK + CALL)
    answer = ask(client, tools=TOOLS)
    message = answer.choices[0].message
    assert message.reasoning_content == message.reasoning == "Let me see."
    assert message.content == "I look."
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "weather",
        {"city": "Rome"},
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    assert asked[0].skip_special_tokens is False
    num_thought = len(llm.tokenizer(THINK.removesuffix("<|start|>assistant")).input_ids)
    assert answer.usage.completion_tokens_details.reasoning_tokens == num_thought


def test_a_stream_joins_to_the_whole(
    client: openai.OpenAI, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, llm, THINK + LOOK + CALL)
    whole = ask(client, tools=TOOLS)
    usage: Any = {"include_usage": True}
    chunks = list(ask(client, tools=TOOLS, stream=True, stream_options=usage))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(thoughts) == "Let me see."
    assert sum(map(bool, thoughts)) > 3
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    first, *rest = [call for delta in deltas for call in delta.tool_calls or ()]
    assert first.function.name == "weather"
    assert "".join(call.function.arguments for call in rest) == '{"city": "Rome"}'
    assert len(rest) > 3
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    assert chunks[-1].usage == whole.usage


@pytest.mark.parametrize("skips", [False, True])
def test_marks_reach_the_parser_whatever_the_caller_says_of_them(
    client: openai.OpenAI, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, skips: bool
) -> None:
    asked = say(monkeypatch, llm, ANSWER)
    answer = ask(client, extra_body={"skip_special_tokens": skips})
    assert answer.choices[0].message.content == "Hot."
    assert asked[0].skip_special_tokens is False


def test_beams_are_read_as_what_is_drawn(
    client: openai.OpenAI, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [llm.tokenizer(text).input_ids for text in (ANSWER, THINK + CALL)]

    async def beam_search(prompt: Any, *_: Any, **__: Any) -> BeamSearchOutput:
        begun = prompt["prompt_token_ids"]
        return BeamSearchOutput(
            [BeamSearchSequence([*begun, *said], finish_reason="stop") for said in ids]
        )

    monkeypatch.setattr(llm, "beam_search", beam_search)
    answer = ask(client, tools=TOOLS, n=2, extra_body={"use_beam_search": True})
    first, second = (choice.message for choice in answer.choices)
    assert (first.reasoning, first.content) == ("Let me see.", "Hot.")
    assert (second.reasoning, second.content) == ("Let me see.", None)
    assert second.tool_calls[0].function.name == "weather"
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "tool_calls"]
    num_thought = len(llm.tokenizer(THINK.removesuffix("<|start|>assistant")).input_ids)
    assert answer.usage.completion_tokens_details.reasoning_tokens == 2 * num_thought


@pytest.mark.parametrize("stop", ["<", "|", "mess"])
def test_a_stop_string_is_not_seen_in_the_marks(
    client: openai.OpenAI, llm: AsyncLLM, stop: str
) -> None:
    """Drawn by the engine: a model that says this alone."""
    ids = llm.tokenizer.get_vocab()
    channel, message = ids["<|channel|>"], ids["<|message|>"]
    grammar = f'start: <[{channel}]> "final" <[{message}]> "so {stop}"'
    body = {"structured_outputs": {"grammar": grammar}, "skip_special_tokens": False}
    prompt = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
    drawn = client.completions.create(model=MODEL, prompt=prompt, stop=[stop], extra_body=body)
    assert drawn.choices[0].text == "<|channel|>final<|message|>so "
    assert drawn.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_can_be_left_out(
    client: openai.OpenAI, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    say(monkeypatch, llm, ANSWER)
    got = ask(client, stream=stream, extra_body={"include_reasoning": False})
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in got)
    else:
        text = got.choices[0].message.content
        assert got.choices[0].message.reasoning_content is None
    assert text == "Hot."


def test_a_response_has_items_in_their_order(
    client: openai.OpenAI, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, llm, THINK + LOOK + CALL)
    tool: Any = {"type": "function", "strict": True, **WEATHER["function"]}
    fields: Any = {"model": MODEL, "input": "hello", "tools": [tool]}
    whole = client.responses.create(**fields, reasoning={"effort": "high"})
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    assert whole.output_text == "I look."
    with client.responses.stream(**fields) as stream:
        for _ in stream:
            pass
        done = stream.get_final_response()
    assert [item.type for item in done.output] == ["reasoning", "message", "function_call"]
    say(monkeypatch, llm, ANSWER)
    call: Any = done.output[2]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "40 degrees"}
    again = client.responses.create(model=MODEL, previous_response_id=done.id, input=[result])
    assert again.output_text == "Hot."


def test_a_message_has_blocks_in_their_order(
    url: str, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, llm, THINK + LOOK + CALL)
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    fields: Any = {
        "model": MODEL,
        "max_tokens": 500,
        "messages": CHAT,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
    }
    whole = client.messages.create(**fields)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    assert whole.content[2].input == {"city": "Rome"}
    assert whole.stop_reason == "tool_use"
    with client.messages.stream(**fields) as stream:
        streamed = stream.get_final_message()
    assert [block.type for block in streamed.content] == ["thinking", "text", "tool_use"]
    assert streamed.content[0] == whole.content[0]


def test_an_answer_that_is_begun_goes_on_as_content(
    url: str, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = say(monkeypatch, llm, "t.")
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    chat: Any = [*CHAT, {"role": "assistant", "content": "Ho"}]
    schema: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answer = client.messages.create(model=MODEL, max_tokens=50, messages=chat, output_config=schema)
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "t."}]
    assert asked[0].structured_outputs is not None
    assert asked[0].structured_outputs.preamble is None


FORCED = [
    ({"tool_choice": "required"}, THINK + CALL, "tool_calls"),
    ({"tool_choice": "required"}, THINK + CALL.replace("weather", "clock"), "tool_calls"),
    ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, CALL, "stop"),
    ({"response_format": {"type": "json_object"}}, None, "stop"),
]


@pytest.mark.parametrize(("fields", "text", "reason"), FORCED)
def test_what_is_forced_is_written_in_the_models_own_form(
    client: openai.OpenAI,
    llm: AsyncLLM,
    monkeypatch: pytest.MonkeyPatch,
    fields: Any,
    text: str | None,
    reason: str,
) -> None:
    text = text or ANSWER.replace("Hot.", '{"hot": true}')
    said = text.removesuffix("<|call|>").removesuffix("<|return|>")
    asked = say(monkeypatch, llm, said)
    tools = {"tools": TOOLS} if "tool_choice" in fields else {}
    answer = ask(client, **tools, **fields)
    check_admitted(llm, said, asked)
    assert bool(answer.choices[0].message.tool_calls) == ("tool_choice" in fields)
    assert answer.choices[0].finish_reason == reason


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ("required", "<|channel|>final"),
        ("required", CALL.replace("weather", "cloc_")),
        ("required", CALL.replace("Rome", "Home")),
        ({"type": "function", "function": {"name": "weather"}}, CALL.replace("weather", "clock")),
    ],
)
def test_nothing_else_may_be_drawn(
    client: openai.OpenAI, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, choice: Any, text: str
) -> None:
    asked = say(monkeypatch, llm, CALL)
    ask(client, tools=TOOLS, tool_choice=choice)
    with pytest.raises(AssertionError):
        check_admitted(llm, text.removesuffix("<|call|>"), asked)


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_without_sense_makes_a_required_call(client: openai.OpenAI, stream: bool) -> None:
    """Drawn by the engine: random weights, which would rather end all they write."""
    got = ask(
        client,
        tools=[WEATHER],
        tool_choice="required",
        stream=stream,
        max_tokens=300,
        extra_body={"logit_bias": ends_bias(client)},
    )
    choice = None if stream else got.choices[0]
    calls = (
        [call for chunk in got for call in chunk.choices[0].delta.tool_calls or ()]
        if choice is None
        else choice.message.tool_calls
    )
    arguments = "".join(call.function.arguments for call in calls)
    assert json.loads(arguments)["city"] in ("Rome", "Paris")
    assert calls[0].function.name == "weather"


def ends_bias(client: openai.OpenAI) -> dict[str, int]:
    """For `<|end|>`: random weights find it as seldom as any token."""
    url = str(client.base_url).removesuffix("/v1/")
    body = {"model": MODEL, "prompt": "<|end|>", "add_special_tokens": False}
    (token_id,) = httpx.post(f"{url}/tokenize", json=body).json()["tokens"]
    return {str(token_id): 100}


def test_a_schema_that_no_grammar_holds_is_refused_by_the_tools_name(client: openai.OpenAI) -> None:
    bad: Any = {"name": "bad", "strict": True, "parameters": {"type": "object", "not": {}}}
    tools = [CLOCK, {"type": "function", "function": bad}]
    with pytest.raises(openai.BadRequestError, match="the parameters of the tool 'bad'"):
        ask(client, tools=tools, tool_choice="required")


@pytest.mark.parametrize("effort", ["low", "medium", "high"])
def test_effort_goes_to_the_template(url: str, client: openai.OpenAI, effort: Any) -> None:
    answer = ask(
        client, reasoning_effort=effort, max_tokens=1, extra_body={"return_token_ids": True}
    )
    body = {"model": MODEL, "tokens": answer.prompt_token_ids}
    prompt = httpx.post(f"{url}/detokenize", json=body).json()["prompt"]
    assert f"Reasoning: {effort}\n" in prompt
    assert prompt.endswith("<|start|>assistant")


def test_effort_that_the_model_does_not_know_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"low, medium or high .* got 'none'"):
        ask(client, reasoning_effort="none")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"tool_call_parser": "openai", "reasoning_parser": "qwen3"},
            "Harmony is the form of both",
        ),
        ({"tool_call_parser": "mistral", "reasoning_parser": "openai_gptoss"}, "form of both"),
        (
            {"reasoning_parser": "openai_gptoss", "chat_template": "{{ messages }}"},
            "knows no tools",
        ),
    ],
)
def test_half_of_the_form_is_refused(llm: AsyncLLM, changed: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServerState(llm, settings(**changed))


@pytest.mark.parametrize(
    "changed",
    [{"tool_call_parser": "gpt-oss"}, {"reasoning_parser": "gpt_oss"}, {"chat_template": None}],
)
def test_any_of_its_names_means_all_of_it(llm: AsyncLLM, changed: Any) -> None:
    assert ServerState(llm, settings(**changed)).forms.harmony is not None


def test_another_parser_may_be_named(llm: AsyncLLM) -> None:
    assert ServerState(llm, settings(reasoning_parser="qwen3")).forms.harmony is None


def test_a_tokenizer_without_the_tokens_is_refused(tmp_path: Path) -> None:
    del tmp_path
    llm = make_llm()
    try:
        with pytest.raises(
            ValueError, match=r"the token '<\|start\|>', which the model's tokenizer"
        ):
            ServerState(llm, settings(chat_template=TEMPLATE.read_text()))
    finally:
        llm.shutdown()
