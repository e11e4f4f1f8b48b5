"""A request for Anthropic's Messages as one for a chat completion."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from flexinfer.server.http.errors import bad_request
from flexinfer.server.protocol.chat import (
    ChatRequest,
    FunctionCall,
    Message,
    NamedFunction,
    NamedToolChoice,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
)
from flexinfer.server.protocol.messages import (
    Block,
    MessageParam,
    MessagesRequest,
    PromptFields,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from flexinfer.server.protocol.sampling import JsonSchemaFormat, ResponseFormat, SamplingFields
from flexinfer.server.state import ServerState


def chat_request(state: ServerState, body: PromptFields) -> ChatRequest:
    """Raises APIError."""
    choice = body.tool_choice
    messages = _messages(body)
    if not messages:
        raise bad_request("the messages have nothing in them", "messages")
    is_begun = messages[-1].role == "assistant"  # the answer goes on where it stops
    fields: dict[str, Any] = {}
    if isinstance(body, MessagesRequest):
        fields = {name: getattr(body, name) for name in SamplingFields.model_fields}
        fields |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences or None}
        if body.metadata is not None:
            fields["user"] = body.metadata.user_id
    tools = [Tool.of(tool, tool.input_schema) for tool in body.tools or ()]
    config = body.output_config
    form = config.format if config else None
    if form is not None:
        schema = JsonSchemaFormat(schema=form.schema_, strict=True)
        fields["response_format"] = ResponseFormat(type="json_schema", json_schema=schema)
    return ChatRequest(
        **fields,
        messages=messages,
        tools=tools or None,
        tool_choice=_choice(body),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        continue_final_message=is_begun,
        add_generation_prompt=not is_begun,
        chat_template_kwargs=_template_kwargs(state, body),
        reasoning_effort=config.effort if config else None,
        include_reasoning=not (body.thinking and body.thinking.display == "omitted"),
    )


def _messages(body: PromptFields) -> list[Message]:
    """Turns of one role in a row are one turn, as Anthropic has it."""
    messages: list[Message] = []
    if body.system:
        messages.append(Message(role="system", content=_text(body.system)))
    for turn in body.messages:
        for message in _turn(turn):
            last = messages[-1] if messages else None
            if last is None or last.role != message.role or message.role == "tool":
                messages.append(message)
                continue
            last.content = [*_parts(last), *_parts(message)]
            last.tool_calls = [*(last.tool_calls or ()), *(message.tool_calls or ())] or None
            last.reasoning_content = message.reasoning_content or last.reasoning_content
    return messages


def _turn(turn: MessageParam) -> list[Message]:
    if isinstance(turn.content, str):
        return [Message(role=turn.role, content=turn.content)]
    if turn.role == "assistant":
        return [_assistant(turn.content)]
    messages = []
    for block in turn.content:
        if isinstance(block, ToolResultBlock):
            messages.append(
                Message(role="tool", content=_result(block), tool_call_id=block.tool_use_id)
            )
        elif not isinstance(block, TextBlock):
            raise _misplaced(block, turn.role)
    texts = [block for block in turn.content if isinstance(block, TextBlock)]
    if texts:
        messages.append(Message(role=turn.role, content=_content(texts)))
    return messages


def _assistant(blocks: Sequence[Block]) -> Message:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            arguments = json.dumps(block.input, ensure_ascii=False)
            function = FunctionCall(name=block.name, arguments=arguments)
            calls.append(ToolCall(id=block.id, function=function))
        else:
            raise _misplaced(block, "assistant")
    return Message(
        role="assistant",
        content=_content(texts),
        tool_calls=calls or None,
        reasoning_content="\n".join(thoughts) or None,
    )


def _result(block: ToolResultBlock) -> str:
    """An error says so: no template knows a mark for it."""
    text = _text([one for one in block.content or () if isinstance(one, TextBlock)])
    if isinstance(block.content, str):
        text = block.content
    return f"Error: {text}" if block.is_error else text


def _content(blocks: Sequence[TextBlock]) -> str | list[TextPart]:
    """Parts stay apart, for templates that take them so."""
    if len(blocks) == 1:
        return blocks[0].text
    return [TextPart(type="text", text=block.text) for block in blocks]


def _parts(message: Message) -> list[TextPart]:
    if isinstance(message.content, str):
        return [TextPart(type="text", text=message.content)] if message.content else []
    return list(message.content or ())


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _choice(body: PromptFields) -> ToolChoice | None:
    choice = body.tool_choice
    if choice is None or (not body.tools and choice.type in ("auto", "none")):
        return None
    if choice.type == "tool":
        if not choice.name:
            raise bad_request("a tool_choice of type tool needs a name", "tool_choice")
        return NamedToolChoice(type="function", function=NamedFunction(name=choice.name))
    return "required" if choice.type == "any" else choice.type


def _template_kwargs(state: ServerState, body: PromptFields) -> dict[str, Any] | None:
    """With what chat templates call `enable_thinking`."""
    kind = body.thinking.type if body.thinking else "adaptive"
    if kind == "enabled" and not state.forms.tells_reasoning:
        raise bad_request(
            "thinking cannot be enabled: this server was started without --reasoning-parser, and "
            "cannot tell thoughts from the answer",
            "thinking",
        )
    asked = {} if kind == "adaptive" else {"enable_thinking": kind == "enabled"}
    return {**(body.chat_template_kwargs or {}), **asked} or None


def _misplaced(block: Any, role: str) -> Exception:
    return bad_request(f"a message of the role {role} has no {block.type} blocks", "messages")
