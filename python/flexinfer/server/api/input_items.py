"""Input items of /v1/responses as messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence

from flexinfer.server.protocol.chat import FunctionCall, Message, ToolCall
from flexinfer.server.protocol.responses import FunctionCallOutput, InputItem, InputMessage


def messages_of(given: str | Sequence[InputItem]) -> list[Message]:
    if isinstance(given, str):
        return [Message(role="user", content=given)]
    return [_message(item) for item in given]


def _message(item: InputItem) -> Message:
    if isinstance(item, InputMessage):
        return Message(role=item.role, content=item.content)
    if isinstance(item, FunctionCallOutput):
        return Message(role="tool", content=item.output, tool_call_id=item.call_id)
    function = FunctionCall(name=item.name, arguments=item.arguments)
    return Message(role="assistant", tool_calls=[ToolCall(id=item.call_id, function=function)])
