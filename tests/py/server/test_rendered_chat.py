"""What the chat template is given of a request, at every endpoint: a prompt that differs is no
error that anybody sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from flexinfer.async_llm import AsyncLLM
from helpers.scripted import say
from helpers.serving import MODEL, serving, settings

SOME_PARTS = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo!"}]
TOOL = {"function": {"name": "clock"}}
PARTS_ALONE = (
    "{% for m in messages %}{{ '<' ~ m.role ~ '>' }}"
    "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}"
    "{% endfor %}{{ tools }}"
)
BOTH = (
    "{% for m in messages %}{{ '<' ~ m.role ~ '>' }}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
    "{{ enable_thinking }}{{ 'T' if tools }}"
)
TEXT_ALONE = (
    "{% for m in messages %}{{ '<' ~ m.role ~ '>' ~ m.content }}"
    "{% for c in m.tool_calls or () %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
Render = Callable[..., str]


@pytest.fixture
def texts(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What templates have made."""
    found: list[str] = []
    tokenize = llm.inputs.tokenize_rendered
    monkeypatch.setattr(
        llm.inputs, "tokenize_rendered", lambda text: found.append(text) or tokenize(text)
    )
    say(monkeypatch, llm, "Hi!")
    return found


@pytest.fixture
def served(llm: AsyncLLM, texts: list[str]) -> Iterator[Callable[..., Render]]:
    """A server with these settings; what its endpoints make of a body."""
    running = []

    def start(**changed: Any) -> Render:
        server = serving(llm, settings(**changed))
        running.append(server)
        url = server.__enter__()

        def render(path: str, **body: Any) -> str:
            answer = httpx.post(url + path, json={"model": MODEL, **body}, timeout=60)
            assert answer.status_code == 200, answer.text
            return texts.pop()

        return render

    yield start
    for server in running:
        server.__exit__(None, None, None)


def chat(render: Render, content: Any = "Hello!", **fields: Any) -> str:
    return render("/v1/chat/completions", messages=[{"role": "user", "content": content}], **fields)


@pytest.mark.parametrize("template", [PARTS_ALONE, BOTH])
@pytest.mark.parametrize("content", ["Hello!", SOME_PARTS])
def test_parts_are_given_where_a_template_takes_them(
    served: Callable[..., Render], template: str, content: Any
) -> None:
    render = served(chat_template=template)
    typed = (
        [{**part, "type": "input_text"} for part in SOME_PARTS] if content != "Hello!" else content
    )
    messages = [{"role": "user", "content": content}]
    assert "<user>Hello!" in chat(render, content)
    assert "<user>Hello!" in render("/tokenize", messages=messages)
    assert "<user>Hello!" in render(
        "/v1/responses", input=[{"role": "user", "content": typed}], instructions="a"
    )
    assert "<user>Hello!" in render("/v1/messages", messages=messages, max_tokens=4, system="a")
    assert "<user>Hello!" in render("/v1/messages/count_tokens", messages=messages)


def test_turns_of_one_role_keep_their_parts(served: Callable[..., Render]) -> None:
    render = served(chat_template=BOTH)
    turns = [{"role": "user", "content": text} for text in ("Hel", "lo!")]
    assert "<user>Hello!" in render("/v1/messages", messages=turns, max_tokens=4)


def test_texts_are_given_where_a_template_takes_them(served: Callable[..., Render]) -> None:
    render = served(chat_template=TEXT_ALONE)
    messages = [{"role": "user", "content": SOME_PARTS}]
    assert "<user>Hel\nlo!" in chat(render, SOME_PARTS)
    assert "<user>Hel\nlo!" in render("/v1/messages", messages=messages, max_tokens=4)


def test_the_operator_may_know_better(
    served: Callable[..., Render], caplog: pytest.LogCaptureFixture
) -> None:
    render = served(chat_template=TEXT_ALONE, chat_template_content_format="openai")
    assert "<user>[{'type': 'text', 'text': 'Hello!'}]" in chat(render)
    assert "the chat template seems to take a text" in caplog.text
    render = served(chat_template=BOTH, chat_template_content_format="string")
    assert "<user>Hel\nlo!" in chat(render, SOME_PARTS)
    with pytest.raises(ValueError, match="chat_template_content_format must be one of 'auto'"):
        settings(chat_template_content_format="parts")


def test_tools_in_words_reach_a_template_of_parts(served: Callable[..., Render]) -> None:
    render = served(chat_template=PARTS_ALONE.replace("{{ tools }}", ""))
    text = chat(render, SOME_PARTS, tools=[TOOL])
    assert '{"name": "clock"}' in text
    assert "<user>Hel\nlo!" in text
    assert "clock" not in chat(render, tools=[TOOL], tool_choice="none")


@pytest.mark.parametrize("arguments", ['{"city": "Ro', "[1]", "null", ""])
def test_a_broken_call_in_the_history_does_not_end_the_chat(
    served: Callable[..., Render], arguments: str
) -> None:
    """max_tokens makes such calls, and clients send them back."""
    function = {"name": "clock", "arguments": arguments}
    messages = [
        {"role": "user", "content": "When?"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "no"},
    ]
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "When?"},
        {"type": "function_call", "call_id": "1", **function},
        {"type": "function_call_output", "call_id": "1", "output": "no"},
    ]
    text = "<user>When?<assistant>{}<tool>no"
    render = served(chat_template=TEXT_ALONE + "{# tools #}")
    assert render("/v1/chat/completions", messages=messages) == text
    assert render("/v1/responses", input=items) == text
    render = served(chat_template=TEXT_ALONE)
    assert '{"name": "clock", "arguments": {}}' in render("/tokenize", messages=messages)


def test_an_effort_says_whether_to_think(served: Callable[..., Render]) -> None:
    """As vLLM, for templates that think only if they are asked to."""
    render = served(chat_template=BOTH)
    assert chat(render) == "<user>Hello!"
    assert chat(render, reasoning_effort="high") == "<user>Hello!True"
    assert chat(render, reasoning_effort="none") == "<user>Hello!False"
    off = {"enable_thinking": False}
    assert chat(render, reasoning_effort="high", chat_template_kwargs=off) == "<user>Hello!False"
    text = render("/v1/responses", input="Hello!", reasoning={"effort": "low"})
    assert text == "<user>Hello!True"
    effort: Any = {"output_config": {"effort": "low"}, "max_tokens": 4}
    turns = [{"role": "user", "content": "Hello!"}]
    assert render("/v1/messages", messages=turns, **effort) == "<user>Hello!True"
    effort["thinking"] = {"type": "disabled"}
    assert render("/v1/messages", messages=turns, **effort) == "<user>Hello!False"


def test_tools_that_may_not_be_called_stay_in_the_prompt(served: Callable[..., Render]) -> None:
    """So the KV of a chat is found again, whatever a turn may call."""
    render = served(chat_template=BOTH)
    with_tools = chat(render, tools=[TOOL])
    assert with_tools == "<user>Hello!T"
    assert chat(render, tools=[TOOL], tool_choice="none") == with_tools
    flat = {"type": "function", "name": "clock", "parameters": {}}
    assert render("/v1/responses", input="Hello!", tools=[flat], tool_choice="none") == with_tools
    turns = [{"role": "user", "content": "Hello!"}]
    told: Any = {"tools": [{"name": "clock", "input_schema": {}}], "tool_choice": {"type": "none"}}
    assert render("/v1/messages", messages=turns, max_tokens=4, **told) == with_tools
    render = served(chat_template=BOTH, exclude_tools_when_tool_choice_none=True)
    assert chat(render, tools=[TOOL], tool_choice="none") == "<user>Hello!"
    assert chat(render, tools=[TOOL]) == with_tools


def test_a_developer_keeps_the_role_where_the_template_knows_it(
    served: Callable[..., Render],
) -> None:
    messages = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "developer", "content": "c"},
    ]
    render = served(chat_template=TEXT_ALONE + "{% if role == 'developer' %}{% endif %}")
    assert render("/tokenize", messages=messages) == "<system>a<user>b<developer>c"
    render = served(chat_template=TEXT_ALONE)
    assert render("/tokenize", messages=messages) == "<system>a\n\nc<user>b"
    words = chat(render, tools=[TOOL])  # a template without tools has them from the system
    assert words.startswith("<system>You may call")
