"""Chats as gpt-oss' template renders them: nothing dropped that the model should read."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from flexinfer.engine.inputs import InputProcessor
from flexinfer.server.chat_renderer import ChatPrompt, ChatRenderer
from flexinfer.server.protocol.chat import Message, Tool
from helpers.harmony import harmony_tokenizer

TOKENIZER = harmony_tokenizer()
BEGIN = "<|start|>assistant"


def user(text: str = "Hi") -> Message:
    return Message(role="user", content=text)


def said(
    content: str | None = None, thoughts: str | None = None, calls: dict[str, str] | None = None
) -> Message:
    """`calls`: id -> name of the function."""
    made: Any = [
        {"id": key, "function": {"name": name, "arguments": '{"a": 1}'}}
        for key, name in (calls or {}).items()
    ]
    return Message(
        role="assistant", content=content, reasoning_content=thoughts, tool_calls=made or None
    )


def answered(key: str, text: str) -> Message:
    return Message(role="tool", tool_call_id=key, content=text)


def rendered(messages: list[Message], tools: Any = (), **given: Any) -> str:
    """After the system message of the template."""
    renderer = ChatRenderer(InputProcessor(TOKENIZER, len(TOKENIZER), 4096), None)
    ids = asyncio.run(renderer.render(ChatPrompt(messages, tools, **given)))
    text: str = TOKENIZER.decode(ids)
    return text.split("Channel must be included for every message.")[1].partition("<|end|>")[2]


def call(name: str) -> str:
    return f'{BEGIN} to=functions.{name}<|channel|>commentary json<|message|>{{"a": 1}}<|call|>'


def answer(name: str, text: str) -> str:
    return (
        f"<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>"
        f"{json.dumps(text)}<|end|>"
    )


ASKED = "<|start|>user<|message|>Hi<|end|>"
THOUGHT = f"{BEGIN}<|channel|>analysis<|message|>Hm<|end|>"
SAID = f"{BEGIN}<|channel|>final<|message|>So<|end|>"


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([user()], ASKED),
        # Reasoning of a turn that is over is dropped, as OpenAI says; that of one under way is not.
        ([user(), said("So", "Hm"), user()], ASKED + SAID + ASKED),
        (
            [user(), said(None, "Hm", {"1": "f"}), answered("1", "x")],
            ASKED + THOUGHT + call("f") + answer("f", "x"),
        ),
        (
            [user(), said(None, "Hm", {"1": "f"}), answered("1", "x"), said("So"), user()],
            ASKED + call("f") + answer("f", "x") + SAID + ASKED,
        ),
        # What the template refuses: text beside thoughts. It is what the model said before a call.
        (
            [user(), said("So", "Hm", {"1": "f"}), answered("1", "x")],
            ASKED + THOUGHT.replace("Hm", "Hm\nSo") + call("f") + answer("f", "x"),
        ),
        # What it drops: all calls but the first.
        (
            [
                user(),
                said(None, "Hm", {"1": "f", "2": "g"}),
                answered("2", "y"),
                answered("1", "x"),
            ],
            ASKED + THOUGHT + call("f") + answer("f", "x") + call("g") + answer("g", "y"),
        ),
        # One answer, in parts.
        (
            [user(), said(None, "Hm"), said(None, None, {"1": "f"}), answered("9", "x")],
            ASKED + THOUGHT + call("f") + answer("f", "x"),
        ),
        (
            [user(), said("So"), said(None, None, {"1": "f"}), answered("1", "x")],
            ASKED + THOUGHT.replace("Hm", "So") + call("f") + answer("f", "x"),
        ),
        ([user(), said("So"), said("So"), user()], ASKED + SAID + SAID + ASKED),
        ([user(), said(None, "cut off"), user()], ASKED + ASKED),
    ],
)
def test_what_was_said_is_rendered(messages: list[Message], text: str) -> None:
    assert rendered(messages) == text + BEGIN


def test_a_call_leaves_what_was_thought_before_it_as_it_was_generated() -> None:
    """So the KV of both is found again, up to the call, which templates write their own way."""
    before = rendered([user()])
    thought = "<|channel|>analysis<|message|> Hm\n<|end|><|start|>assistant"
    after = rendered([user(), said(None, " Hm\n", {"1": "f"}), answered("1", "x")])
    assert after.startswith(before + thought)


def test_all_instructions_stand_at_the_start() -> None:
    given: Any = [("system", "One."), ("developer", "Two."), ("user", "Hi"), ("system", "Three.")]
    found = rendered([Message(role=role, content=text) for role, text in given])
    head = "<|start|>developer<|message|># Instructions\n\nOne.\n\nTwo.\n\nThree.\n\n<|end|>"
    assert found == head + ASKED + BEGIN


def test_a_tool_without_description_is_one() -> None:
    tool = Tool.model_validate({"type": "function", "function": {"name": "clock"}})
    assert "// \ntype clock = () => any;" in rendered([user()], [tool])


def test_an_answer_goes_on() -> None:
    given: Any = {"add_generation_prompt": False, "continue_final_message": True}
    assert rendered([user(), said("So")], **given) == ASKED + SAID.removesuffix("<|end|>")


def test_an_answer_to_no_call_is_refused_by_the_template() -> None:
    with pytest.raises(Exception, match="no previous assistant message with a tool call"):
        rendered([user(), answered("1", "x")])
