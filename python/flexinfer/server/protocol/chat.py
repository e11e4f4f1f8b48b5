"""What `/v1/chat/completions` takes and answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from flexinfer.server.protocol.base import FinishReason, FunctionName, Model, PromptLogprobs, Usage
from flexinfer.server.protocol.refused import Refused, RefusedDisabled
from flexinfer.server.protocol.sampling import SamplingFields

MAX_MESSAGES = 8192
"""Validating them holds up everybody, for about 10 us each."""
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def _only_text(kind: str) -> str:
    if kind not in TEXT_PARTS:
        raise ValueError(f"parts of type {kind!r} are not supported: this server reads text only")
    return kind


class TextPart(Model):
    type: Annotated[str, AfterValidator(_only_text)]
    text: str = ""
    refusal: str = ""

    @property
    def words(self) -> str:
        return self.text or self.refusal


Content = str | Annotated[list[TextPart], Field(fail_fast=True)]


class FunctionCall(Model):
    name: str
    arguments: str
    """JSON, unless it was cut off by max_tokens."""


class ToolCall(Model):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Model):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same by vLLM's newer name; templates decide what becomes of it."""
    refusal: Refused = None
    audio: Refused = None
    function_call: Refused = None
    tools: Refused = None

    @property
    def text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "\n".join(part.words for part in self.content)

    @property
    def num_bytes(self) -> int:
        """About what it holds."""
        calls = sum(len(call.function.arguments) for call in self.tool_calls or ())
        thoughts = len(self.reasoning_content or self.reasoning or "")
        return 256 + 2 * (len(self.text) + calls + thoughts)


class Function(Model):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Model):
    type: Literal["function"] = "function"
    function: Function

    @classmethod
    def of(cls, tool: Any, parameters: dict[str, Any] | None) -> Tool:
        """From another endpoint's tool, whose fields stand in no `function`."""
        function = Function(
            name=tool.name,
            description=tool.description,
            parameters=parameters,
            strict=tool.strict,
        )
        return cls(type="function", function=function)


class NamedFunction(Model):
    name: str


class NamedToolChoice(Model):
    type: Literal["function"] = "function"
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class ConversationRef(Model):
    id: str
    ttl: float | None = Field(default=None, gt=0)
    """Seconds that the prefix stays pinned after this turn."""


Documents = Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES, fail_fast=True)]
"""What an answer is to be drawn from, for chat templates that have a place for it."""


class ChatRequest(SamplingFields):
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    """The old name of max_completion_tokens."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=-1)
    """-1: all, where the server admits so many."""
    prompt_logprobs: int | None = Field(default=None, ge=-1)
    tools: Annotated[list[Tool], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    conversation: str | ConversationRef | None = None
    """A conversation that goes on: `messages` are only the new ones."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Documents | None = None
    reasoning_effort: str | None = None
    """For the chat template, which is told to think by any but "none" (enable_thinking)."""
    include_reasoning: bool | None = None
    """False: reasoning is not shown."""
    return_token_ids: bool | None = None
    # Fields of the other endpoints.
    echo: Refused = None
    suffix: Refused = None
    prompt: Refused = None
    input: Refused = None
    instructions: Refused = None
    max_output_tokens: Refused = None
    text: Refused = None
    previous_response_id: Refused = None
    add_special_tokens: Refused = None
    reasoning: Refused = None  # here it is reasoning_effort
    system: Refused = None
    thinking: Refused = None
    output_config: Refused = None
    stop_sequences: Refused = None
    include: Refused = None
    truncation: RefusedDisabled = None
    background: Refused = None
    max_tool_calls: Refused = None


class TokenLogprob(Model):
    token: str
    logprob: float
    bytes: list[int] | None = None


class ContentLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Model):
    content: list[ContentLogprob] | None


class AnswerMessage(Model):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same: vLLM's newer name."""
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Model):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(Model):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None
    conversation: Annotated[str | None, Field(description="Id, if one goes on.")] = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
