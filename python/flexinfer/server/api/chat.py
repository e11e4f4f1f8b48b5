"""`POST /v1/chat/completions`: the assistant's next message, whole or streamed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from flexinfer.outputs import BeamSearchOutput, CompletionOutput, RequestOutput
from flexinfer.server.api import generate
from flexinfer.server.api.chat_prompt import ChatPrompt
from flexinfer.server.api.chat_stream import ChatStream
from flexinfer.server.api.conversation_store import Conversation
from flexinfer.server.api.generate import Job
from flexinfer.server.api.logprobs import chat_logprobs
from flexinfer.server.api.prompts import decode, make_prompt
from flexinfer.server.api.sampling import beam_params, sampling_params
from flexinfer.server.api.tools import Parsed, ToolUse, finish_reason, tool_use
from flexinfer.server.http.errors import bad_request
from flexinfer.server.http.fast_route import DirectRoute
from flexinfer.server.http.streaming import OR_EVENTS, Events, start_stream, until_gone
from flexinfer.server.observability.logs import current_request_id
from flexinfer.server.protocol.chat import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatRequest,
    ConversationRef,
    Message,
)
from flexinfer.server.state import ServerState, State, Tenant

router = APIRouter(prefix="/v1", tags=["chat"])


@dataclass(frozen=True)
class Call:
    """One request, ready to be computed."""

    state: ServerState
    body: ChatRequest
    job: Job
    tools: ToolUse
    messages: Sequence[Message]
    """The whole chat, with what a conversation had before."""
    conversation: Conversation | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model(self) -> str:
        return self.body.model or self.state.settings.model_name

    @property
    def num_top_logprobs(self) -> int | None:
        return (self.body.top_logprobs or 0) if self.body.logprobs else None


@router.post(
    "/chat/completions",
    response_model=ChatCompletion,
    response_model_exclude_none=False,
    responses=OR_EVENTS,
)
async def create_chat_completion(
    request: Request, state: State, tenant: Tenant, body: ChatRequest
) -> Response | ChatCompletion:
    """The assistant's next message. With `stream`, server-sent events."""
    state.check_serving(body.model)
    if body.conversation is None:
        return await _answer(request, await prepare(state, tenant, body, None))
    ref = body.conversation
    if isinstance(ref, str):
        ref = ConversationRef(id=ref)
    if (body.n or 1) > 1 or body.use_beam_search:
        raise bad_request("a conversation goes on with one answer: fork it instead", "n")
    conversation = state.conversations.begin_turn(tenant, ref.id, ref.ttl)
    try:
        answer = await _answer(request, await prepare(state, tenant, body, conversation))
    except BaseException:
        state.conversations.end_turn(conversation)
        raise
    if not body.wants_stream:  # else the stream's end is the turn's
        state.conversations.end_turn(conversation)
    return answer


DIRECT = DirectRoute("/v1/chat/completions", create_chat_completion, ChatRequest)


async def prepare(
    state: ServerState, tenant: str, body: ChatRequest, conversation: Conversation | None
) -> Call:
    """Raises APIError for what can not be served."""
    max_tokens = body.max_completion_tokens or body.max_tokens
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs", "top_logprobs")
    tools = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
    if body.use_beam_search:
        if body.logprobs or tools.structure:
            raise bad_request("beam search gives no logprobs, and forces no tool call")
        params: Any = beam_params(state, body, max_tokens=max_tokens)
    else:
        params = sampling_params(
            state,
            body,
            max_tokens=max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            structure=tools.structure,
        )
    messages = [*(conversation.messages if conversation else ()), *body.messages]
    token_ids = await state.chat.render(
        ChatPrompt(
            messages,
            tools.tools,
            add_generation_prompt=body.add_generation_prompt is not False
            and not body.continue_final_message,
            continue_final_message=bool(body.continue_final_message),
            template_kwargs=body.chat_template_kwargs or {},
        )
    )
    prompt = make_prompt(
        state, token_ids, tenant, body.cache_salt, max_tokens=max_tokens, param="messages"
    )
    job = Job(f"chatcmpl-{current_request_id()}", tenant, [prompt], params, body.priority or 0)
    return Call(state, body, job, tools, messages, conversation)


async def _answer(request: Request, call: Call) -> Response | ChatCompletion:
    body, state = call.body, call.state
    if body.use_beam_search:
        (found,) = await until_gone(request, generate.beams(state, call.job))
        return _beam_answer(call, found)
    if body.wants_stream:
        return await start_stream(request, _events(call), state.settings.send_timeout_s)
    (output,) = await until_gone(request, generate.finals(state, call.job))
    answer = final_answer(call, output)
    await _keep(call, answer.choices[0].message, output.outputs[0].token_ids)
    generate.log_usage(answer.usage)
    return answer


def final_answer(call: Call, output: RequestOutput) -> ChatCompletion:
    """The whole answer, from the engine's final output."""
    return ChatCompletion(
        id=call.job.request_id,
        created=call.created,
        model=call.model,
        choices=[_choice(call, one) for one in output.outputs],
        usage=generate.usage_of([output]),
        conversation=call.conversation.id if call.conversation else None,
        prompt_token_ids=output.prompt_token_ids if call.body.return_token_ids else None,
    )


def _choice(call: Call, one: CompletionOutput) -> ChatChoice:
    parsed = Parsed(one.text)
    parser = call.tools.parser()
    if parser is not None:
        head, tail = parser.feed(one.text), parser.finish()
        parsed = Parsed(head.content + tail.content, head.calls + tail.calls)
    num_top = call.num_top_logprobs
    return ChatChoice(
        index=one.index,
        message=AnswerMessage(
            content=parsed.content if parsed.content or not parsed.calls else None,
            tool_calls=list(parsed.calls) or None,
        ),
        logprobs=None if num_top is None else chat_logprobs(one, num_top),
        finish_reason=finish_reason(call.tools, one, bool(parsed.calls)),
        stop_reason=one.stop_reason,
        token_ids=one.token_ids if call.body.return_token_ids else None,
    )


def _beam_answer(call: Call, found: BeamSearchOutput) -> ChatCompletion:
    """The n best sequences, best first."""
    num_prompt = len(call.job.prompts[0]["prompt_token_ids"])
    chosen = found.sequences[: call.body.n or 1]
    texts = [decode(call.state, s.tokens[num_prompt:]) for s in chosen]
    return ChatCompletion(
        id=call.job.request_id,
        created=call.created,
        model=call.model,
        choices=[
            ChatChoice(
                index=index,
                message=AnswerMessage(content=text),
                finish_reason=sequence.finish_reason,  # type: ignore[arg-type]
            )
            for index, (sequence, text) in enumerate(zip(chosen, texts, strict=True))
        ],
        usage=generate.make_usage(num_prompt, sum(len(s.tokens) - num_prompt for s in chosen), 0),
    )


async def _events(call: Call) -> Events:
    stream = ChatStream(call)
    try:
        async with aclosing(generate.stream(call.state, call.job)) as outputs:
            async for _, output in outputs:
                if text := stream.add(output):
                    yield text
        await _keep(call, stream.message(0), stream.token_ids(0))
        yield stream.finish()
    finally:
        generate.log_usage(stream.usage())
        if call.conversation is not None:
            call.state.conversations.end_turn(call.conversation)


async def _keep(call: Call, answer: AnswerMessage, token_ids: Sequence[int]) -> None:
    """A conversation remembers the turn, and pins its tokens."""
    if call.conversation is None:
        return
    prompt = call.job.prompts[0]
    said = Message(role="assistant", content=answer.content, tool_calls=answer.tool_calls)
    await call.state.conversations.keep(
        call.conversation,
        [*call.messages, said],
        [*prompt["prompt_token_ids"], *token_ids],
        prompt["cache_salt"],
    )
