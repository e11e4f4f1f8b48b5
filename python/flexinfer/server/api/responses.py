"""`/v1/responses`: the text subset of OpenAI's Responses, on top of chat completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from fastapi.responses import Response as HTTPResponse

from flexinfer.server.api import generate
from flexinfer.server.api.chat_call import ChatCall, final_answer, prepare_chat
from flexinfer.server.api.chat_stream import ChatStream
from flexinfer.server.api.input_items import messages_of
from flexinfer.server.http.json_route import JsonRoute
from flexinfer.server.http.streaming import (
    STREAMING_RESPONSES,
    Events,
    event,
    start_stream,
    until_disconnect,
)
from flexinfer.server.observability.logs import new_id
from flexinfer.server.protocol.chat import (
    AnswerMessage,
    ChatRequest,
    Function,
    Message,
    NamedFunction,
    NamedToolChoice,
    Tool,
    ToolCall,
)
from flexinfer.server.protocol.responses import (
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    NamedTool,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    Response,
    ResponseDeleted,
    ResponsesRequest,
    ResponseUsage,
    TextConfig,
)
from flexinfer.server.protocol.sampling import JsonSchemaFormat, ResponseFormat, SamplingFields
from flexinfer.server.state import ServerState, State, Tenant
from flexinfer.server.stores.responses import StoredResponse

router = APIRouter(prefix="/v1/responses", tags=["responses"], route_class=JsonRoute)
ResponseId = Annotated[str, Path(max_length=128)]


@dataclass(frozen=True)
class Call:
    """One request, ready to be computed, and the answer as far as it is known before."""

    chat: ChatCall
    body: ResponsesRequest
    tenant: str
    messages: tuple[Message, ...]
    """The chat without instructions: these hold for one answer only."""
    num_before: int
    """Of these, those of the response that this one continues."""
    empty: Response

    def answer(
        self, message: AnswerMessage, finish_reason: str, usage: Any, message_id: str
    ) -> Response:
        """The finished response; it is stored unless the caller wants it not to be."""
        is_cut = finish_reason == "length"
        status: Any = "incomplete" if is_cut else "completed"
        output: list[OutputMessage | FunctionCallItem] = []
        if message.content or not message.tool_calls:
            text = OutputText(text=message.content or "")
            output.append(OutputMessage(id=message_id, status=status, content=[text]))
        output += [_call_item(call) for call in message.tool_calls or ()]
        done = self.empty.model_copy(
            update={
                "status": status,
                "output": output,
                "completed_at": time.time(),
                "incomplete_details": IncompleteDetails(reason="max_output_tokens")
                if is_cut
                else None,
                "usage": ResponseUsage(
                    input_tokens=usage.prompt_tokens,
                    input_tokens_details=InputTokensDetails(
                        cached_tokens=usage.prompt_tokens_details.cached_tokens
                    ),
                    output_tokens=usage.completion_tokens,
                    output_tokens_details=OutputTokensDetails(),
                    total_tokens=usage.total_tokens,
                ),
            }
        )
        if self.body.store is not False:
            said = Message(role="assistant", content=message.content, tool_calls=message.tool_calls)
            # Messages before are shared with the response that this one goes on from.
            num_bytes = 2 * len(done.model_dump_json())
            num_bytes += sum(one.num_bytes for one in self.messages[self.num_before :])
            stored = StoredResponse(self.tenant, done, (*self.messages, said), num_bytes)
            self.chat.state.responses.put(stored)
        return done


@router.post("", response_model=Response, responses=STREAMING_RESPONSES)
async def create_response(
    request: Request, state: State, tenant: Tenant, body: ResponsesRequest
) -> HTTPResponse | Response:
    """An answer to a text or a chat. With `stream`, server-sent events."""
    state.check_serving(body.model)
    call = await _prepare(state, tenant, body)
    if body.stream:
        return await start_stream(request, _events(call), state.settings.send_timeout_s)
    (output,) = await until_disconnect(request, generate.generate_final(state, call.chat.job))
    answer = final_answer(call.chat, output)
    choice = answer.choices[0]
    generate.log_usage(answer.usage)
    return call.answer(choice.message, choice.finish_reason, answer.usage, f"msg_{new_id()}")


@router.get("/{response_id}")
async def get_response(state: State, tenant: Tenant, response_id: ResponseId) -> Response:
    return state.responses.get(tenant, response_id).response


@router.delete("/{response_id}")
async def delete_response(state: State, tenant: Tenant, response_id: ResponseId) -> ResponseDeleted:
    state.responses.delete(tenant, response_id)
    return ResponseDeleted(id=response_id)


async def _prepare(state: ServerState, tenant: str, body: ResponsesRequest) -> Call:
    before: Sequence[Message] = ()
    if body.previous_response_id is not None:
        stored = state.responses.get(tenant, body.previous_response_id, "previous_response_id")
        before = stored.messages
    messages = (*before, *messages_of(body.input))
    instructions = [Message(role="system", content=body.instructions)] if body.instructions else []
    tools = [
        Tool(
            type="function",
            function=Function(
                name=tool.name, description=tool.description, parameters=tool.parameters
            ),
        )
        for tool in body.tools or ()
    ]
    choice = body.tool_choice
    sampling = {name: getattr(body, name) for name in SamplingFields.model_fields}
    request = ChatRequest(
        **sampling | {"response_format": _format(body.text)},
        messages=[*instructions, *messages],
        max_completion_tokens=body.max_output_tokens,
        chat_template_kwargs=body.chat_template_kwargs,
        tools=tools or None,
        tool_choice=NamedToolChoice(type="function", function=NamedFunction(name=choice.name))
        if isinstance(choice, NamedTool)
        else choice,
        parallel_tool_calls=body.parallel_tool_calls,
    )
    prepared = await prepare_chat(state, tenant, request, None)
    return Call(prepared, body, tenant, messages, len(before), _empty(prepared, body))


def _empty(prepared: ChatCall, body: ResponsesRequest) -> Response:
    """The response before anything is generated."""
    choice = body.tool_choice
    text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {}
    return Response(
        id=f"resp_{new_id()}",
        created_at=float(prepared.created),
        status="in_progress",
        model=prepared.model,
        output=[],
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        prompt_cache_key=body.prompt_cache_key,
        safety_identifier=body.safety_identifier,
        reasoning=body.reasoning,
        store=body.store is not False,
        user=body.user,
        text={"format": {"type": "text"}, **text},
        tool_choice=choice.model_dump() if isinstance(choice, NamedTool) else choice or "auto",
        tools=[tool.model_dump() for tool in body.tools or ()],
    )


def _format(text: TextConfig | None) -> ResponseFormat | None:
    wanted = text.format if text else None
    if wanted is None:
        return None
    schema = None
    if wanted.type == "json_schema":
        schema = JsonSchemaFormat(name=wanted.name, schema=wanted.schema_, strict=wanted.strict)
    return ResponseFormat(type=wanted.type, json_schema=schema)


def _call_item(call: ToolCall) -> FunctionCallItem:
    return FunctionCallItem(
        id=f"fc_{call.id.removeprefix('call_')}",
        call_id=call.id,
        name=call.function.name,
        arguments=call.function.arguments,
        status="completed",
    )


async def _events(call: Call) -> Events:
    """The events of one response, as OpenAI orders them."""
    writer = _EventWriter(call)
    message_id = f"msg_{new_id()}"
    stream = ChatStream(call.chat)
    finish_reason = "stop"
    try:
        async with aclosing(generate.stream(call.chat.state, call.chat.job)) as outputs:
            async for _, output in outputs:
                events = writer.start()
                for delta in stream.deltas(output):
                    events += writer.text(message_id, delta)
                if events:
                    yield "".join(events)
                finish_reason = output.outputs[0].finish_reason or finish_reason
    finally:
        generate.log_usage(stream.usage())
    done = call.answer(stream.message(0), finish_reason, stream.usage(), message_id)
    yield "".join(writer.finish(done))


class _EventWriter:
    """Numbers the events, and opens the message when it gets its first text."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._sequence = 0
        self._has_message = False

    def start(self) -> list[str]:
        if self._sequence:
            return []
        empty = self._call.empty.model_dump(by_alias=True)
        return [
            self._event("response.created", response=empty),
            self._event("response.in_progress", response=empty),
        ]

    def text(self, message_id: str, delta: str) -> list[str]:
        if not delta:
            return []
        where = {"item_id": message_id, "output_index": 0, "content_index": 0}
        events = [] if self._has_message else self._open(message_id)
        events.append(self._event("response.output_text.delta", **where, delta=delta, logprobs=[]))
        return events

    def finish(self, done: Response) -> list[str]:
        events: list[str] = []
        for output_index, item in enumerate(done.output):
            if isinstance(item, OutputMessage):
                events += self._close(item)
            else:
                events += self._function_call(item, output_index)
        name = "response.completed" if done.status == "completed" else "response.incomplete"
        return [*events, self._event(name, response=done.model_dump(by_alias=True))]

    def _open(self, message_id: str) -> list[str]:
        self._has_message = True
        item = OutputMessage(id=message_id, status="in_progress", content=[])
        part = OutputText(text="")
        where = {"item_id": message_id, "output_index": 0, "content_index": 0}
        return [
            self._event("response.output_item.added", output_index=0, item=item.model_dump()),
            self._event("response.content_part.added", **where, part=part.model_dump()),
        ]

    def _close(self, item: OutputMessage) -> list[str]:
        events = [] if self._has_message else self._open(item.id)
        (part,) = item.content
        where = {"item_id": item.id, "output_index": 0, "content_index": 0}
        return [
            *events,
            self._event("response.output_text.done", **where, text=part.text, logprobs=[]),
            self._event("response.content_part.done", **where, part=part.model_dump()),
            self._event("response.output_item.done", output_index=0, item=item.model_dump()),
        ]

    def _function_call(self, item: FunctionCallItem, output_index: int) -> list[str]:
        opened = item.model_copy(update={"arguments": "", "status": "in_progress"})
        where = {"item_id": item.id, "output_index": output_index}
        added = {"output_index": output_index, "item": opened.model_dump()}
        done = {"output_index": output_index, "item": item.model_dump()}
        arguments = "response.function_call_arguments"
        return [
            self._event("response.output_item.added", **added),
            self._event(f"{arguments}.delta", **where, delta=item.arguments),
            self._event(f"{arguments}.done", **where, name=item.name, arguments=item.arguments),
            self._event("response.output_item.done", **done),
        ]

    def _event(self, event_type: str, /, **fields: Any) -> str:
        data = {"type": event_type, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event(data, event_type)
