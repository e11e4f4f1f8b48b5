"""What `/v1/messages` takes and answers: Anthropic's Messages, text and tools."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic.json_schema import SkipJsonSchema

from flexinfer.server.protocol.base import FunctionName, Model
from flexinfer.server.protocol.chat import MAX_MESSAGES
from flexinfer.server.protocol.refused import (
    Refused,
    RefusedAny,
    RefusedBut1,
    RefusedDisabled,
    RefusedFalse,
    RefusedFields,
)
from flexinfer.server.protocol.sampling import SamplingFields


class TextBlock(Model):
    type: Literal["text"]
    text: str


class ThinkingBlock(Model):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""
    """Empty: nothing is signed here, and nothing checked."""


class ToolUseBlock(Model):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


def _unread(kind: Any) -> Any:
    raise ValueError(f"blocks of type {kind!r} are not supported: this server reads text only")


class UnreadBlock(Model):
    type: Annotated[Any, AfterValidator(_unread)]


READ = ("text", "thinking", "tool_use", "tool_result")
UNREAD = "(unread)"
"""No identifier: the path of an error leaves it out."""


def _kind_of(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return kind if kind in READ else UNREAD


ResultContent = Annotated[
    Annotated[TextBlock, Tag("text")] | Annotated[SkipJsonSchema[UnreadBlock], Tag(UNREAD)],
    Discriminator(lambda block: "text" if _kind_of(block) == "text" else UNREAD),
]


class ToolResultBlock(Model):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[ResultContent], Field(fail_fast=True)] | None = None
    is_error: bool | None = None


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[SkipJsonSchema[UnreadBlock], Tag(UNREAD)],
    Discriminator(_kind_of),
]


class MessageParam(Model):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(max_length=MAX_MESSAGES, fail_fast=True)]


def _custom(kind: str | None) -> str | None:
    if kind not in (None, "custom"):
        raise ValueError(f"tools of type {kind!r} run at Anthropic and are not served here")
    return kind


class ToolParam(Model):
    type: Annotated[str | None, AfterValidator(_custom)] = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoiceParam(Model):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Model):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    """Not kept: max_tokens alone bounds what is thought and said."""
    display: Literal["summarized", "omitted"] | None = None
    """Nothing is summarized: thoughts are shown as they are, or not."""


class OutputFormat(Model):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Model):
    format: OutputFormat | None = None
    effort: str | None = None


class RequestMetadata(Model):
    user_id: str | None = None


class PromptFields(RefusedFields):
    """What decides what the model reads."""

    model: str
    messages: Annotated[
        list[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ]
    system: str | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    tools: Annotated[list[ToolParam], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """As vLLM has it; `thinking` is one of them."""
    documents: Refused = None


class MessagesRequest(PromptFields, SamplingFields):
    """With the fields of how tokens are chosen that other endpoints have."""

    model: str
    max_tokens: int = Field(ge=1)
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = None
    temperature: float | None = Field(default=None, ge=0, le=1)
    metadata: RequestMetadata | None = None
    # What is said otherwise here, and fields of the other endpoints.
    n: RefusedBut1 = None
    best_of: RefusedBut1 = None
    stop: Refused = None  # here it is stop_sequences
    response_format: Refused = None  # here it is output_config.format
    use_beam_search: Refused = None
    stream_options: Refused = None
    reasoning_effort: Refused = None  # here it is output_config.effort
    reasoning: Refused = None
    include_reasoning: RefusedFalse = None
    logprobs: RefusedAny = None
    top_logprobs: Refused = None
    prompt_logprobs: RefusedAny = None
    return_token_ids: Refused = None
    max_completion_tokens: Refused = None
    max_output_tokens: Refused = None
    prompt: Refused = None
    input: Refused = None
    instructions: Refused = None
    text: Refused = None
    echo: Refused = None
    suffix: Refused = None
    conversation: Refused = None
    previous_response_id: Refused = None
    continue_final_message: Refused = None
    add_generation_prompt: RefusedFalse = None
    add_special_tokens: Refused = None
    include: Refused = None
    truncation: RefusedDisabled = None
    background: Refused = None
    max_tool_calls: Refused = None


class CountRequest(PromptFields):
    """`max_tokens` and how tokens are chosen have no say in it."""


class MessagesTokensDetails(Model):
    thinking_tokens: int
    """With those of the tags."""


class MessagesUsage(Model):
    input_tokens: int
    """Of the prompt, without those of the cache."""
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens_details: MessagesTokensDetails | None = None


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class MessageAnswer(Model):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage


class MessagesErrorDetail(Model):
    type: str
    message: str


class MessagesError(Model):
    type: Literal["error"] = "error"
    error: MessagesErrorDetail


class TokenCount(Model):
    input_tokens: int
