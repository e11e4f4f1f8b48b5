"""`/v1/responses`: the text subset of OpenAI's Responses, on top of chat completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from fastapi.responses import Response as HTTPResponse

from flexinfer.outputs import CompletionOutput
from flexinfer.sampling.params import SamplingParams
from flexinfer.server.api import generate
from flexinfer.server.api.chat_call import ChatCall, num_reasoning, prepare_chat
from flexinfer.server.api.chat_stream import ChatStream
from flexinfer.server.api.input_items import messages_of
from flexinfer.server.api.logprobs import chat_logprobs
from flexinfer.server.api.response_items import items_of
from flexinfer.server.api.response_stream import ResponseStream
from flexinfer.server.api.saying import Saying
from flexinfer.server.http.errors import bad_request
from flexinfer.server.http.json_route import JsonRoute
from flexinfer.server.http.streaming import (
    STREAMING_RESPONSES,
    Events,
    start_stream,
    until_disconnect,
)
from flexinfer.server.protocol.base import Usage
from flexinfer.server.protocol.chat import (
    ChatRequest,
    ContentLogprob,
    Message,
    NamedFunction,
    NamedToolChoice,
    Tool,
)
from flexinfer.server.protocol.responses import (
    LOGPROBS,
    IncompleteDetails,
    InputTokensDetails,
    NamedTool,
    OutputTokensDetails,
    Response,
    ResponseDeleted,
    ResponsesRequest,
    ResponseUsage,
    TextConfig,
)
from flexinfer.server.protocol.sampling import JsonSchemaFormat, ResponseFormat, SamplingFields
from flexinfer.server.state import ServerState, State, Tenant
from flexinfer.server.stores.kept_ids import kept_id
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

    def logprobs(self, one: CompletionOutput) -> list[ContentLogprob]:
        """Of the tokens of an output, if they are asked for."""
        num_top = self.chat.num_top_logprobs
        if num_top is None or not one.logprobs:
            return []
        return chat_logprobs(one, num_top, self.chat.state.token_bytes).content or []

    def answer(
        self,
        said: Saying,
        finish_reason: str,
        usage: Usage,
        logprobs: Sequence[ContentLogprob],
        item_ids: Sequence[str] = (),
    ) -> Response:
        """The finished response; it is stored unless the caller wants it not to be. `item_ids`:
        those that have been told."""
        is_cut = finish_reason == "length"
        status: Any = "incomplete" if is_cut else "completed"
        cached, reasoned = usage.prompt_tokens_details, usage.completion_tokens_details
        done = self.empty.model_copy(
            update={
                "status": status,
                "output": items_of(said.answer, said.call_ids, item_ids, status, logprobs),
                "completed_at": time.time(),
                "incomplete_details": IncompleteDetails(reason="max_output_tokens")
                if is_cut
                else None,
                "usage": ResponseUsage(
                    input_tokens=usage.prompt_tokens,
                    input_tokens_details=InputTokensDetails(
                        cached_tokens=cached.cached_tokens if cached else 0
                    ),
                    output_tokens=usage.completion_tokens,
                    output_tokens_details=OutputTokensDetails(
                        reasoning_tokens=reasoned.reasoning_tokens if reasoned else 0
                    ),
                    total_tokens=usage.total_tokens,
                ),
            }
        )
        if self.body.store is not False:
            words = said.message
            message = Message(
                role="assistant",
                content=words.content,
                tool_calls=words.tool_calls,
                reasoning_content=words.reasoning_content,
            )
            # Messages before are shared with the response that this one goes on from.
            num_bytes = 2 * len(done.model_dump_json())
            num_bytes += sum(one.num_bytes for one in self.messages[self.num_before :])
            stored = StoredResponse(self.tenant, done, (*self.messages, message), num_bytes)
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
    said = Saying.begin(call.chat.reading)
    said.read(output.outputs[0])
    usage = generate.usage_of([output], num_reasoning(call.chat, [said]))
    generate.log_usage(usage)
    (one,) = output.outputs
    return call.answer(said, one.finish_reason or "stop", usage, call.logprobs(one))


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
    tools = [Tool.of(tool, tool.parameters) for tool in body.tools or ()]
    choice = body.tool_choice
    sampling = {name: getattr(body, name) for name in SamplingFields.model_fields}
    with_logprobs = LOGPROBS in (body.include or ())
    if body.top_logprobs and not with_logprobs:
        raise bad_request(f"top_logprobs needs {LOGPROBS!r} in include", "top_logprobs")
    request = ChatRequest(
        **sampling | {"response_format": _format(body.text)},
        messages=[*instructions, *messages],
        max_completion_tokens=body.max_output_tokens,
        logprobs=with_logprobs,
        top_logprobs=body.top_logprobs if with_logprobs else None,
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort=_effort(body.reasoning),
        include_reasoning=body.include_reasoning,
        tools=tools or None,
        tool_choice=NamedToolChoice(type="function", function=NamedFunction(name=choice.name))
        if isinstance(choice, NamedTool)
        else choice,
        parallel_tool_calls=body.parallel_tool_calls,
    )
    prepared = await prepare_chat(state, tenant, request, None)
    if request.logprobs and prepared.reading.parser() is not None:
        raise bad_request(
            "log probabilities are told of plain text: neither with tools nor beside reasoning",
            "include",
        )
    return Call(prepared, body, tenant, messages, len(before), _empty(prepared, body))


def _empty(prepared: ChatCall, body: ResponsesRequest) -> Response:
    """The response before anything is generated."""
    choice = body.tool_choice
    # With the defaults, but for beams, which take neither.
    params = prepared.job.params
    drawn = params if isinstance(params, SamplingParams) else SamplingParams()
    text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {}
    return Response(
        id=kept_id("resp", prepared.state.replica),
        created_at=float(prepared.created),
        status="in_progress",
        model=prepared.model,
        output=[],
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        temperature=drawn.temperature,
        top_p=drawn.top_p,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        prompt_cache_key=body.prompt_cache_key,
        safety_identifier=body.safety_identifier,
        top_logprobs=body.top_logprobs or 0,
        reasoning=body.reasoning,
        store=body.store is not False,
        user=body.user,
        text={"format": {"type": "text"}, **text},
        tool_choice=choice.model_dump() if isinstance(choice, NamedTool) else choice or "auto",
        tools=[tool.model_dump() for tool in body.tools or ()],
    )


def _effort(reasoning: dict[str, Any] | None) -> str | None:
    effort = (reasoning or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise bad_request("reasoning.effort must be a text", "reasoning")
    return effort


def _format(text: TextConfig | None) -> ResponseFormat | None:
    wanted = text.format if text else None
    if wanted is None:
        return None
    schema = None
    if wanted.type == "json_schema":
        schema = JsonSchemaFormat(name=wanted.name, schema=wanted.schema_, strict=wanted.strict)
    return ResponseFormat(type=wanted.type, json_schema=schema)


async def _events(call: Call) -> Events:
    """The events of one response."""
    writer = ResponseStream(call.empty)
    stream = ChatStream(call.chat)
    finish_reason = "stop"
    try:
        async with aclosing(generate.stream(call.chat.state, call.chat.job)) as outputs:
            async for _, output in outputs:
                pieces = stream.pieces(output)
                logprobs = call.logprobs(output.outputs[0])
                events = [*writer.start(), *writer.add(pieces, stream.said().call_ids, logprobs)]
                if events:
                    yield "".join(events)
                finish_reason = output.outputs[0].finish_reason or finish_reason
    finally:
        generate.log_usage(stream.usage())
    done = call.answer(
        stream.said(), finish_reason, stream.usage(), writer.logprobs, writer.item_ids
    )
    yield "".join(writer.finish(done))
