"""ChatCall: one request for a chat completion, checked and rendered, and its answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flexinfer.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    RequestOutput,
)
from flexinfer.sampling.params import SamplingParams
from flexinfer.server.api import generate
from flexinfer.server.api.generate import Job
from flexinfer.server.api.logprobs import chat_logprobs, prompt_logprobs
from flexinfer.server.api.prompts import decode, make_prompt, truncated
from flexinfer.server.api.reading import Reading, reading_of
from flexinfer.server.api.sampling import beam_params, sampling_params
from flexinfer.server.api.saying import Saying
from flexinfer.server.api.tools import ToolUse, check_schemas, finish_reason, tool_use
from flexinfer.server.chat_renderer import ChatPrompt
from flexinfer.server.http.errors import bad_request
from flexinfer.server.observability.logs import current_request_id
from flexinfer.server.parsing.harmony_marks import EFFORTS
from flexinfer.server.protocol.chat import (
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
    reading: Reading
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
    state: ServerState,
    tenant: str,
    body: ChatRequest,
    conversation: Conversation | None,
    *,
    cuts_answer: bool = False,
) -> ChatCall:
    """Raises APIError for what cannot be served. `cuts_answer`: one that would not fit into the
    model's context may end there, however long it may be."""
    asked_tokens = body.max_completion_tokens or body.max_tokens
    max_tokens = state.llm.sampling_defaults.limited(asked_tokens)
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs", "top_logprobs")
    tools = tool_use(state, body.tools, body.tool_choice, body.parallel_tool_calls)
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
    await check_schemas(state, tenant, tools)
    _check_effort(state, body.reasoning_effort)
    messages = [*(conversation.messages if conversation else ()), *body.messages]
    _check_number(state, messages)
    token_ids = await state.chat.render(_prompt(body, messages, tools))
    token_ids = truncated(state, body, token_ids, max_tokens)
    reading = reading_of(state, tools, token_ids, body.include_reasoning is not False)
    if isinstance(params, SamplingParams):
        params = _read_as(params, reading, body)
        if cuts_answer and max_tokens is not None:
            longest = max(1, state.llm.max_model_len - len(token_ids))
            params = replace(params, max_tokens=min(max_tokens, longest))
    prompt = make_prompt(
        state,
        token_ids,
        tenant,
        body.cache_salt,
        max_tokens=None if cuts_answer else max_tokens,
        param="messages",
        fields=body,
    )
    name, adapter = f"chatcmpl-{current_request_id()}", state.choose(body.model)
    job = Job(name, tenant, [prompt], params, body.priority or 0, adapter)
    return ChatCall(state, body, job, reading, messages, conversation)


def _prompt(body: ChatRequest, messages: Sequence[Message], tools: ToolUse) -> ChatPrompt:
    return ChatPrompt(
        messages,
        tools.in_prompt,
        add_generation_prompt=not body.continue_final_message
        if body.add_generation_prompt is None
        else body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        documents=body.documents,
        template_kwargs=_template_kwargs(body),
    )


def _check_number(state: ServerState, messages: Sequence[Message]) -> None:
    """Raises APIError for more messages than tokens: a template takes long to find that out, and
    holds up the engine meanwhile."""
    longest = state.llm.max_model_len
    if len(messages) > longest:
        raise bad_request(
            f"This model's maximum context length is {longest} tokens; a chat of {len(messages)} "
            "messages has more: shorten it",
            "messages",
            "context_length_exceeded",
        )


def final_answer(call: ChatCall, output: RequestOutput) -> ChatCompletion:
    """The whole answer, from the engine's final output."""
    said = [Saying.begin(call.reading) for _ in output.outputs]
    choices = [_choice(call, *pair) for pair in zip(said, output.outputs, strict=True)]
    return ChatCompletion(
        id=call.job.request_id,
        created=call.created,
        model=call.model,
        choices=choices,
        usage=generate.usage_of([output], num_reasoning(call, said)),
        conversation=call.conversation.id if call.conversation else None,
        system_fingerprint=call.state.fingerprint,
        prompt_token_ids=output.prompt_token_ids if call.body.return_token_ids else None,
        prompt_logprobs=prompt_logprobs(output, call.body.prompt_logprobs),
    )


def num_reasoning(call: ChatCall, said: Sequence[Saying]) -> int | None:
    """Tokens; None where reasoning is not told from the rest."""
    if not call.reading.tells_reasoning:
        return None
    return sum(one.num_reasoning_tokens for one in said)


def _choice(call: ChatCall, said: Saying, one: CompletionOutput) -> ChatChoice:
    said.read(one)
    num_top = call.num_top_logprobs
    return ChatChoice(
        index=one.index,
        message=said.message,
        logprobs=None if num_top is None else chat_logprobs(one, num_top, call.state.token_bytes),
        finish_reason=finish_reason(call.reading.tools, one, said.has_calls),
        stop_reason=one.stop_reason,
        token_ids=one.token_ids if call.body.return_token_ids else None,
    )


def _check_effort(state: ServerState, effort: str | None) -> None:
    """Raises APIError for one that the model would read, and does not know."""
    if state.forms.harmony is not None and effort not in (None, *EFFORTS):
        raise bad_request(
            f"reasoning_effort must be {', '.join(EFFORTS[:-1])} or {EFFORTS[-1]} for this model, "
            f"which always reasons; got {effort!r}",
            "reasoning_effort",
        )


def _template_kwargs(body: ChatRequest) -> dict[str, Any]:
    """What the caller says itself goes before what its effort comes to."""
    effort = body.reasoning_effort
    implied: dict[str, Any] = {}
    if effort is not None:
        implied = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return implied | (body.chat_template_kwargs or {})


def _read_as(params: SamplingParams, reading: Reading, body: ChatRequest) -> SamplingParams:
    """Marks that are special tokens stay in the text; a structure begins after the reasoning."""
    if _needs_marks(reading, body):
        params = replace(params, skip_special_tokens=False)
    structure = params.structured_outputs
    if structure is not None:
        structure = replace(structure, preamble=reading.preamble)
        params = replace(params, structured_outputs=structure)
    return params


def _needs_marks(reading: Reading, body: ChatRequest) -> bool:
    """Whether special tokens stay in the text for its reading, and not for the caller."""
    is_free = body.skip_special_tokens is None or reading.hides_special_tokens
    return reading.needs_special_tokens and is_free


def beam_answer(call: ChatCall, found: BeamSearchOutput) -> ChatCompletion:
    """The n best sequences, best first."""
    num_prompt = len(call.job.prompts[0]["prompt_token_ids"])
    outputs = [
        _as_output(call, sequence, sequence.tokens[num_prompt:], index)
        for index, sequence in enumerate(found.sequences[: call.body.n or 1])
    ]
    said = [Saying.begin(call.reading) for _ in outputs]
    num_tokens = sum(len(one.token_ids) for one in outputs)
    return ChatCompletion(
        id=call.job.request_id,
        created=call.created,
        model=call.model,
        choices=[_choice(call, *pair) for pair in zip(said, outputs, strict=True)],
        usage=generate.make_usage(num_prompt, num_tokens, 0, num_reasoning(call, said)),
    )


def _as_output(
    call: ChatCall, sequence: BeamSearchSequence, token_ids: list[int], index: int
) -> CompletionOutput:
    """A sequence of beam search as sampling would give it. `token_ids`: without the prompt."""
    needs_marks = _needs_marks(call.reading, call.body)
    is_ended = needs_marks and sequence.finish_reason == "stop"
    text = decode(
        call.state,
        token_ids[:-1] if is_ended else token_ids,
        special_tokens=needs_marks or call.body.skip_special_tokens is False,
    )
    return CompletionOutput(index, text, token_ids, finish_reason=sequence.finish_reason)
