"""ChatCall: one request for a chat completion, checked and rendered, and its answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flexinfer.outputs import BeamSearchOutput, CompletionOutput, RequestOutput
from flexinfer.server.api import generate
from flexinfer.server.api.generate import Job
from flexinfer.server.api.logprobs import chat_logprobs, prompt_logprobs
from flexinfer.server.api.prompts import decode, make_prompt
from flexinfer.server.api.sampling import beam_params, sampling_params
from flexinfer.server.api.tools import Parsed, ToolUse, finish_reason, tool_use
from flexinfer.server.chat_renderer import ChatPrompt
from flexinfer.server.http.errors import bad_request
from flexinfer.server.observability.logs import current_request_id
from flexinfer.server.protocol.chat import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatRequest,
    Message,
)
from flexinfer.server.state import ServerState
from flexinfer.server.stores.conversations import Conversation


@dataclass(frozen=True)
class ChatCall:
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


async def prepare_chat(
    state: ServerState, tenant: str, body: ChatRequest, conversation: Conversation | None
) -> ChatCall:
    """Raises APIError for what cannot be served."""
    max_tokens = body.max_completion_tokens or body.max_tokens
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs", "top_logprobs")
    tools = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
    if body.use_beam_search:
        if body.logprobs or body.prompt_logprobs is not None or tools.structure:
            raise bad_request("beam search has neither logprobs nor forced tool calls")
        params: Any = beam_params(state, body, max_tokens=max_tokens)
    else:
        params = sampling_params(
            state,
            body,
            max_tokens=max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
            structure=tools.structure,
        )
    messages = [*(conversation.messages if conversation else ()), *body.messages]
    token_ids = await state.chat.render(
        ChatPrompt(
            messages,
            tools.tools,
            add_generation_prompt=not body.continue_final_message
            if body.add_generation_prompt is None
            else body.add_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
            template_kwargs=body.chat_template_kwargs or {},
        )
    )
    prompt = make_prompt(
        state,
        token_ids,
        tenant,
        body.cache_salt,
        max_tokens=max_tokens,
        param="messages",
        fields=body,
    )
    job = Job(f"chatcmpl-{current_request_id()}", tenant, [prompt], params, body.priority or 0)
    return ChatCall(state, body, job, tools, messages, conversation)


def final_answer(call: ChatCall, output: RequestOutput) -> ChatCompletion:
    """The whole answer, from the engine's final output."""
    return ChatCompletion(
        id=call.job.request_id,
        created=call.created,
        model=call.model,
        choices=[_choice(call, one) for one in output.outputs],
        usage=generate.usage_of([output]),
        conversation=call.conversation.id if call.conversation else None,
        system_fingerprint=call.state.fingerprint,
        prompt_token_ids=output.prompt_token_ids if call.body.return_token_ids else None,
        prompt_logprobs=prompt_logprobs(output, call.body.prompt_logprobs),
    )


def _choice(call: ChatCall, one: CompletionOutput) -> ChatChoice:
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
        logprobs=None if num_top is None else chat_logprobs(one, num_top, call.state.token_bytes),
        finish_reason=finish_reason(call.tools, one, bool(parsed.calls)),
        stop_reason=one.stop_reason,
        token_ids=one.token_ids if call.body.return_token_ids else None,
    )


def beam_answer(call: ChatCall, found: BeamSearchOutput) -> ChatCompletion:
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
