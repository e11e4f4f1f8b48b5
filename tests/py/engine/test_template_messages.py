"""Messages are put as the chat template takes them, alike for every caller."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest

from flexinfer.engine.chat_template import TemplateTraits
from flexinfer.engine.template_messages import template_messages
from flexinfer.errors import RequestError

TEXTS, PARTS = TemplateTraits(), TemplateTraits(takes_parts=True)


def taken(*messages: dict[str, Any], traits: TemplateTraits = TEXTS) -> list[dict[str, Any]]:
    """Nothing is changed in place, and what comes of it stays as it is."""
    before = copy.deepcopy(messages)
    found = template_messages(messages, traits)
    assert messages == before
    assert template_messages(found, traits) == found
    return found


def said(arguments: Any) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize(
    ("content", "text", "parts"),
    [
        ("a", "a", [{"type": "text", "text": "a"}]),
        (
            [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b", "more": 1}],
            "a\nb",
            [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "more": 1}],
        ),
        ([], "", []),
    ],
)
def test_a_content_is_a_text_or_parts(content: Any, text: str, parts: Any) -> None:
    for role in ("system", "user", "assistant"):
        message = {"role": role, "content": content}
        assert taken(message)[0]["content"] == text
        assert taken(message, traits=PARTS)[0]["content"] == parts


def test_an_answer_of_a_tool_is_a_text_in_any_case() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "tool", "content": parts, "tool_call_id": "1"}
    assert taken(message, traits=PARTS) == [{**message, "content": "a\nb"}]


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ('{"x": 1}', {"x": 1}),
        ({"x": 1}, {"x": 1}),
        ("", {}),
        (None, {}),
        ('{"city": "Ro', {}),
        ("[1]", {}),
        ("3", {}),
        ("[" * 200_000, {}),
        ([1], {}),
    ],
)
def test_arguments_of_a_call_are_an_object(given: Any, arguments: Any) -> None:
    (message,) = taken(said(given))
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": arguments}


def test_arguments_that_are_lost_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        template_messages([said('{"secret": "Ro'), said(""), said("{}")], TEXTS)
    (record,) = caplog.records
    assert "a call of 'f' in a chat's history are no JSON object (14 char" in record.getMessage()
    assert "secret" not in record.getMessage()


def test_an_empty_list_of_calls_is_none() -> None:
    message = {"role": "assistant", "content": "a", "tool_calls": []}
    assert taken(message) == [{"role": "assistant", "content": "a"}]


def test_calls_of_another_form_are_the_templates_matter() -> None:
    message = {"role": "assistant", "content": "a", "tool_calls": [{"name": "f"}]}
    assert taken(message) == [message]


def messages(*pairs: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in pairs]


def test_a_developer_is_the_system_where_no_template_knows_the_role() -> None:
    given = messages(("developer", "a"), ("user", "b"))
    assert taken(*given) == given
    unknown = TemplateTraits(knows_developer=False)
    assert taken(*given, traits=unknown) == messages(("system", "a"), ("user", "b"))
    late = messages(("system", "a"), ("user", "b"), ("developer", "c"))
    assert taken(*late, traits=unknown) == messages(("system", "a\n\nc"), ("user", "b"))
    in_parts = TemplateTraits(takes_parts=True, knows_developer=False)
    first = taken(*late, traits=in_parts)[0]
    assert first == {"role": "system", "content": [{"type": "text", "text": "a\n\nc"}]}


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("a", "a message is a dict"),
        ({"content": "a"}, "the role of a message"),
        ({"role": "user"}, "the content of a message"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "can be text alone"),
    ],
)
def test_what_is_no_message_is_refused(message: Any, error: str) -> None:
    with pytest.raises(RequestError, match=error):
        template_messages([message], TEXTS)
