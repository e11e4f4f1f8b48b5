"""Reasoning apart from the answer, at every endpoint, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

anthropic = pytest.importorskip("anthropic")

from flexinfer.async_llm import AsyncLLM
from flexinfer.sampling.grammars import Preamble, StructuredOutputsParams
from helpers.scripted import say
from helpers.serving import MODEL, serving, settings

CHAT: Any = [{"role": "user", "content": "hello"}]
WORDS = '<think>\nLet me see.\n</think>\n\nHi! <tool_call>{"name": "clock"}</tool_call>'
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
TEMPLATE = (
    "{{ tools }}{% for m in messages %}{{ '<|' ~ m.role ~ '|>' ~ m.content ~ "
    "(m.reasoning_content or '') }}{% endfor %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)


@pytest.fixture(scope="module")
def url(llm: AsyncLLM) -> Iterator[str]:
    with serving(llm, settings(reasoning_parser="qwen3", chat_template=TEMPLATE)) as found:
        yield found


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def asked(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return say(monkeypatch, llm, WORDS)


@pytest.mark.usefixtures("asked")
def test_a_chat_has_it_apart(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, tools=[CLOCK])
    message: Any = answer.choices[0].message
    assert message.reasoning_content == message.reasoning == "Let me see."
    assert message.content == "Hi! "
    assert [call.function.name for call in message.tool_calls] == ["clock"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    num_thought = answer.usage.completion_tokens_details.reasoning_tokens
    assert num_thought is not None
    assert 5 < num_thought < answer.usage.completion_tokens - 5


@pytest.mark.usefixtures("asked")
def test_a_stream_joins_to_the_whole(client: openai.OpenAI) -> None:
    fields: Any = {"model": MODEL, "messages": CHAT, "tools": [CLOCK]}
    whole = client.chat.completions.create(**fields)
    chunks = list(
        client.chat.completions.create(
            **fields, stream=True, stream_options={"include_usage": True}
        )
    )
    deltas: list[Any] = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(thoughts) == "Let me see."
    assert sum(map(bool, thoughts)) > 3
    assert "".join(delta.content or "" for delta in deltas) == "Hi! "
    assert chunks[-1].usage == whole.usage
    assert chunks[-2].choices[0].finish_reason == "tool_calls"


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("stream", [False, True])
def test_it_can_be_left_out(client: openai.OpenAI, stream: bool) -> None:
    got: Any = client.chat.completions.create(
        model=MODEL, messages=CHAT, stream=stream, extra_body={"include_reasoning": False}
    )
    text = str(list(got)) if stream else got.model_dump_json()
    assert "Let" not in text
    assert "Hi" in text


def test_where_thinking_is_off_all_is_content(client: openai.OpenAI, asked: list[Any]) -> None:
    off: Any = {"chat_template_kwargs": {"enable_thinking": False}}
    message: Any = (
        client.chat.completions.create(model=MODEL, messages=CHAT, extra_body=off)
        .choices[0]
        .message
    )
    assert message.content == WORDS
    assert message.reasoning_content is None
    message = (
        client.chat.completions.create(model=MODEL, messages=CHAT, reasoning_effort="none")
        .choices[0]
        .message
    )
    assert message.content == WORDS


@pytest.mark.usefixtures("asked")
def test_a_response_has_items_in_their_order(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "name": "clock", "parameters": {}, "strict": False}
    fields: Any = {"model": MODEL, "input": "hello", "tools": [tool]}
    whole = client.responses.create(**fields)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    thought: Any = whole.output[0]
    assert thought.content[0].text == "Let me see."
    assert whole.output_text == "Hi! "
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens > 5
    with client.responses.stream(**fields) as stream:
        events = [event.type for event in stream]
        done = stream.get_final_response()
    assert [item.type for item in done.output] == ["reasoning", "message", "function_call"]
    first = events.index("response.reasoning_text.delta")
    assert events[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert first < events.index("response.reasoning_text.done")
    assert events.count("response.output_item.done") == 3
    again = client.responses.create(model=MODEL, input=[*done.to_dict()["output"], *CHAT])  # type: ignore[misc]
    assert again.status == "completed"


@pytest.mark.usefixtures("asked")
def test_a_message_has_blocks_in_their_order(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    fields: Any = {
        "model": MODEL,
        "max_tokens": 500,
        "messages": CHAT,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tools": [{"name": "clock", "input_schema": {"type": "object"}}],
    }
    whole = client.messages.create(**fields)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    assert whole.stop_reason == "tool_use"
    assert whole.usage.cache_read_input_tokens == 3
    assert whole.usage.output_tokens_details is not None
    assert whole.usage.output_tokens_details.thinking_tokens == 20
    with client.messages.stream(**fields) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert [block.type for block in streamed.content] == ["thinking", "text", "tool_use"]
    assert streamed.content[0] == whole.content[0]
    assert events.count("content_block_stop") == 3
    turn: Any = {"role": "assistant", "content": whole.content}
    result: Any = {"type": "tool_result", "tool_use_id": "x", "content": "noon", "is_error": True}
    chat: Any = [*CHAT, turn, {"role": "user", "content": [result]}]
    del fields["max_tokens"]
    counted = client.messages.count_tokens(**fields | {"messages": chat})
    assert (
        counted.input_tokens > client.messages.count_tokens(model=MODEL, messages=CHAT).input_tokens
    )


def test_a_structure_begins_after_it(client: openai.OpenAI, asked: list[Any]) -> None:
    form: Any = {"structured_outputs": {"choice": ["yes"]}}
    client.chat.completions.create(model=MODEL, messages=CHAT, extra_body=form)
    off = {**form, "chat_template_kwargs": {"enable_thinking": False}}
    client.chat.completions.create(model=MODEL, messages=CHAT, extra_body=off)
    structures = [params.structured_outputs for params in asked]
    assert [one.preamble for one in structures] == [Preamble("</think>", "<think>"), None]


@pytest.mark.parametrize(
    ("preamble", "before"),
    [
        (Preamble("</think>"), 'I <think> {"a"}\n</think>\n\n'),
        (Preamble("</think>", "<think>"), '<think>\n{"a"}</think>\n'),
        (Preamble("</think>", "<think>"), ""),
        (Preamble("<|user|>", "<|system|>"), "<|system|>so</think><|user|>\n"),  # special tokens
    ],
)
def test_the_grammar_knows_what_may_come_before(
    llm: AsyncLLM, preamble: Preamble, before: str
) -> None:
    params = StructuredOutputsParams(choice=["yes", "no"], preamble=preamble)
    matcher = llm.grammars.matcher(params)
    ids = llm.tokenizer(before, add_special_tokens=False).input_ids
    allowed = np.flatnonzero(matcher.allowed(ids))
    firsts = {llm.tokenizer.decode([one]).strip() for one in allowed}
    assert firsts - {"", "<", preamble.open} <= {"y", "n", "ye", "yes", "no"}
    assert {"y", "n"} <= firsts


def test_thinking_is_not_promised_by_a_server_that_cannot_tell_it(http: httpx.Client) -> None:
    body = {"model": MODEL, "max_tokens": 5, "messages": CHAT, "thinking": {"type": "enabled"}}
    answer = http.post("/v1/messages", json=body)
    assert answer.status_code == 400
    assert "--reasoning-parser" in answer.json()["error"]["message"]
