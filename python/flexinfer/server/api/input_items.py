"""Input items of /v1/responses as messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence

from flexinfer.server.protocol.chat import FunctionCall, Message, ToolCall
from flexinfer.server.protocol.responses import (
    FunctionCallItem,
    FunctionCallOutput,
    InputItem,
    InputMessage,
    ReasoningItem,
)


def messages_of(given: str | Sequence[InputItem]) -> list[Message]:
    """What an answer consisted of, that is reasoning, text and calls in a row, is one message."""
    if isinstance(given, str):
        return [Message(role="user", content=given)]
    messages: list[Message] = []
    for item in given:
        last = messages[-1] if messages else None
        if last is None or not _goes_on(last, item):
            messages.append(_message(item))
        elif isinstance(item, FunctionCallItem):
            last.tool_calls = [*(last.tool_calls or ()), _call(item)]
        elif isinstance(item, InputMessage):
            last.content = item.content
    return messages


def _goes_on(last: Message, item: InputItem) -> bool:
    if last.role != "assistant":
        return False
    if isinstance(item, InputMessage):
        return item.role == "assistant" and last.content is None and not last.tool_calls
    return isinstance(item, FunctionCallItem)


def _message(item: InputItem) -> Message:
    if isinstance(item, InputMessage):
        return Message(role=item.role, content=item.content)
    if isinstance(item, FunctionCallOutput):
        return Message(role="tool", content=item.output, tool_call_id=item.call_id)
    if isinstance(item, ReasoningItem):
        text = "".join(part.text for part in item.content or ())
        return Message(role="assistant", reasoning_content=text)
    assert isinstance(item, FunctionCallItem)  # what is not read is refused before
    return Message(role="assistant", tool_calls=[_call(item)])


def _call(item: FunctionCallItem) -> ToolCall:
    function = FunctionCall(name=item.name, arguments=item.arguments)
    return ToolCall(id=item.call_id, function=function)
