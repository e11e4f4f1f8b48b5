"""`POST /v1/chat/completions`: the assistant's next message, whole or streamed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing

from fastapi import APIRouter, Request
from fastapi.responses import Response

from flexinfer.server.api import generate
from flexinfer.server.api.chat_call import ChatCall, beam_answer, final_answer, prepare_chat
from flexinfer.server.api.chat_stream import ChatStream
from flexinfer.server.http.errors import bad_request
from flexinfer.server.http.fast_route import FastRoute
from flexinfer.server.http.json_route import JsonRoute
from flexinfer.server.http.streaming import (
    STREAMING_RESPONSES,
    Events,
    start_stream,
    until_disconnect,
)
from flexinfer.server.protocol.chat import (
    AnswerMessage,
    ChatCompletion,
    ChatRequest,
    ConversationRef,
    Message,
)
from flexinfer.server.state import State, Tenant

router = APIRouter(prefix="/v1", tags=["chat"], route_class=JsonRoute)


@router.post(
    "/chat/completions",
    response_model=ChatCompletion,
    response_model_exclude_none=False,
    responses=STREAMING_RESPONSES,
)
async def create_chat_completion(
    request: Request, state: State, tenant: Tenant, body: ChatRequest
) -> Response | ChatCompletion:
    """The assistant's next message. With `stream`, server-sent events."""
    state.check_serving(body.model)
    if body.conversation is None:
        return await _answer(request, await prepare_chat(state, tenant, body, None))
    ref = body.conversation
    if isinstance(ref, str):
        ref = ConversationRef(id=ref)
    if (body.n or 1) > 1 or body.use_beam_search:
        raise bad_request("a conversation continues with one answer: fork it instead", "n")
    conversation = state.conversations.begin_turn(tenant, ref.id, ref.ttl)
    try:
        answer = await _answer(request, await prepare_chat(state, tenant, body, conversation))
    except BaseException:
        state.conversations.end_turn(conversation)
        raise
    if not body.wants_stream:  # else the stream's end is the turn's
        state.conversations.end_turn(conversation)
    return answer


FAST_ROUTE = FastRoute("/v1/chat/completions", create_chat_completion, ChatRequest)


async def _answer(request: Request, call: ChatCall) -> Response | ChatCompletion:
    body, state = call.body, call.state
    if body.use_beam_search:
        (found,) = await until_disconnect(request, generate.beam_search(state, call.job))
        return beam_answer(call, found)
    if body.wants_stream:
        return await start_stream(request, _events(call), state.settings.send_timeout_s)
    (output,) = await until_disconnect(request, generate.generate_final(state, call.job))
    answer = final_answer(call, output)
    await _keep(call, answer.choices[0].message, output.outputs[0].token_ids)
    generate.log_usage(answer.usage)
    return answer


async def _events(call: ChatCall) -> Events:
    stream = ChatStream(call)
    try:
        async with aclosing(generate.stream(call.state, call.job)) as outputs:
            async for _, output in outputs:
                if text := stream.add(output):
                    yield text
        if call.conversation is not None:
            said = stream.said()
            await _keep(call, said.message, said.token_ids)
        yield stream.finish()
    finally:
        generate.log_usage(stream.usage())
        if call.conversation is not None:
            call.state.conversations.end_turn(call.conversation)


async def _keep(call: ChatCall, answer: AnswerMessage, token_ids: Sequence[int]) -> None:
    """A conversation remembers the turn, and pins its tokens."""
    if call.conversation is None:
        return
    prompt = call.job.prompts[0]
    said = Message(
        role="assistant",
        content=answer.content,
        tool_calls=answer.tool_calls,
        reasoning_content=answer.reasoning_content,
    )
    await call.state.conversations.keep(
        call.conversation,
        [*call.messages, said],
        [*prompt["prompt_token_ids"], *token_ids],
        call.state.adapters.kv_salt(prompt["cache_salt"], call.job.adapter),
    )
