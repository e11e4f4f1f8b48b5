"""`POST /v1/messages`: Anthropic's Messages, on top of chat completions."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic_core import from_json

from flexinfer.outputs import CompletionOutput, RequestOutput
from flexinfer.server.api import generate
from flexinfer.server.api.chat_call import ChatCall, num_reasoning, prepare_chat
from flexinfer.server.api.chat_stream import ChatStream
from flexinfer.server.api.messages_input import chat_request
from flexinfer.server.api.messages_stream import MessageStream
from flexinfer.server.api.saying import Saying
from flexinfer.server.http.json_route import JsonRoute
from flexinfer.server.http.streaming import (
    STREAMING_RESPONSES,
    Events,
    start_stream,
    until_disconnect,
)
from flexinfer.server.observability.logs import current_request_id
from flexinfer.server.parsing.pieces import CallPart, Content, TextPart
from flexinfer.server.protocol.base import Usage
from flexinfer.server.protocol.messages import (
    AnswerBlock,
    CountRequest,
    MessageAnswer,
    MessagesRequest,
    MessagesTokensDetails,
    MessagesUsage,
    StopReason,
    TextBlock,
    ThinkingBlock,
    TokenCount,
    ToolUseBlock,
)
from flexinfer.server.state import State, Tenant

router = APIRouter(prefix="/v1/messages", tags=["messages"], route_class=JsonRoute)


@router.post("", response_model=MessageAnswer, responses=STREAMING_RESPONSES)
async def create_message(
    request: Request, state: State, tenant: Tenant, body: MessagesRequest
) -> Response | MessageAnswer:
    """The assistant's next message. With `stream`, server-sent events."""
    state.check_serving(body.model)
    call = await prepare_chat(state, tenant, chat_request(state, body), None, cuts_answer=True)
    if body.stream:
        return await start_stream(request, _events(call), state.settings.send_timeout_s)
    (output,) = await until_disconnect(request, generate.generate_final(state, call.job))
    said = Saying.begin(call.reading)
    said.read(output.outputs[0])
    usage = generate.usage_of([output], num_reasoning(call, [said]))
    generate.log_usage(usage)
    return _message(call, said, output.outputs[0], usage)


@router.post("/count_tokens")
async def count_tokens(state: State, tenant: Tenant, body: CountRequest) -> TokenCount:
    """Of the prompt, as the model would read it."""
    state.check_serving(body.model)
    call = await prepare_chat(state, tenant, chat_request(state, body), None, cuts_answer=True)
    return TokenCount(input_tokens=len(call.job.prompts[0]["prompt_token_ids"]))


async def _events(call: ChatCall) -> Events:
    stream, writer = ChatStream(call), MessageStream()
    last: RequestOutput | None = None
    try:
        async with aclosing(generate.stream(call.state, call.job)) as outputs:
            async for _, output in outputs:
                pieces = stream.pieces(output)
                events = "" if last else writer.start(_empty(call, stream.usage()))
                events += writer.add(pieces, stream.said().call_ids)
                if events:
                    yield events
                last = output
    finally:
        generate.log_usage(stream.usage())
    assert last is not None
    yield writer.finish(_message(call, stream.said(), last.outputs[0], stream.usage()))


def _empty(call: ChatCall, usage: Usage) -> MessageAnswer:
    return MessageAnswer(
        id=f"msg_{current_request_id()}",
        model=call.model,
        content=[],
        stop_reason=None,
        stop_sequence=None,
        usage=_usage(usage),
    )


def _message(call: ChatCall, said: Saying, last: CompletionOutput, usage: Usage) -> MessageAnswer:
    reason = _stop_reason(call, said, last, usage)
    return _empty(call, usage).model_copy(
        update={
            "content": _blocks(said),
            "stop_reason": reason,
            "stop_sequence": last.stop_reason if reason == "stop_sequence" else None,
        }
    )


def _blocks(said: Saying) -> list[AnswerBlock]:
    ids = iter(said.call_ids)
    blocks: list[AnswerBlock] = []
    for part in said.answer.parts:
        if isinstance(part, CallPart):
            given = _input(part.arguments)
            blocks.append(ToolUseBlock(type="tool_use", id=next(ids), name=part.name, input=given))
        else:
            blocks.append(_block(part))
    return blocks


def _block(part: TextPart) -> AnswerBlock:
    if part.kind is Content:
        return TextBlock(type="text", text=part.text)
    return ThinkingBlock(type="thinking", thinking=part.text)


def _input(arguments: str) -> dict[str, Any]:
    """An object in any case: cut off by max_tokens, what is whole of it."""
    try:
        value = from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _stop_reason(call: ChatCall, said: Saying, last: CompletionOutput, usage: Usage) -> StopReason:
    if last.finish_reason == "length":
        limit = call.state.llm.sampling_defaults.limited(call.body.max_tokens)
        is_full = usage.completion_tokens < (limit or 0)
        return "model_context_window_exceeded" if is_full else "max_tokens"
    if isinstance(last.stop_reason, str):
        return "stop_sequence"
    return "tool_use" if said.has_calls else "end_turn"


def _usage(usage: Usage) -> MessagesUsage:
    details, reasoned = usage.prompt_tokens_details, usage.completion_tokens_details
    num_cached = details.cached_tokens if details else 0
    return MessagesUsage(
        input_tokens=usage.prompt_tokens - num_cached,
        output_tokens=usage.completion_tokens,
        cache_read_input_tokens=num_cached,
        output_tokens_details=MessagesTokensDetails(thinking_tokens=reasoned.reasoning_tokens)
        if reasoned
        else None,
    )
