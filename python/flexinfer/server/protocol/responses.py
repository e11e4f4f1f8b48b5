"""What `/v1/responses` takes and answers: the text subset."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic.json_schema import SkipJsonSchema

from flexinfer.server.protocol.base import FunctionName, Metadata, Model
from flexinfer.server.protocol.chat import MAX_MESSAGES, Content, ContentLogprob
from flexinfer.server.protocol.refused import Refused, RefusedAny, RefusedFalse
from flexinfer.server.protocol.sampling import SamplingFields


class InputMessage(Model):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: str | None = None
    status: str | None = None


class FunctionCallItem(Model):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class FunctionCallOutput(Model):
    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: str | None = None
    status: str | None = None


class ReasoningText(Model):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class ReasoningItem(Model):
    type: Literal["reasoning"]
    id: str | None = None
    summary: list[Any] = Field(default_factory=list)
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None
    status: str | None = None


def _unread(kind: Any) -> Any:
    raise ValueError(f"items of type {kind!r} are not supported: give {', '.join(READ)}")


class UnreadItem(Model):
    type: Annotated[Any, AfterValidator(_unread)]


READ = ("message", "function_call", "function_call_output", "reasoning")


def _kind_of(item: Any) -> str:
    """An item's type, which messages may leave out."""
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if kind in READ else "other"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[SkipJsonSchema[UnreadItem], Tag("other")],
    Discriminator(_kind_of),
]
"""Chosen by its type: of a plain union all faults of all types would be found, item by item."""
InputItems = Annotated[list[InputItem], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class TextFormat(Model):
    """As `response_format` of chat completions, but flat."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(Model):
    format: TextFormat | None = None
    verbosity: str | None = None


class FunctionTool(Model):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(Model):
    type: Literal["function"]
    name: str


def _one(value: int | None) -> int | None:
    if value not in (None, 1):
        raise ValueError("a response is one answer")
    return value


def _not_cut(value: str | None) -> str | None:
    if value == "auto":
        raise ValueError("'auto' is not supported: the input is never cut")
    return value


LOGPROBS = "message.output_text.logprobs"
"""In `include`: what tells log probabilities of a response's text."""


class ResponsesRequest(SamplingFields):
    input: str | Annotated[InputItems, Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    text: TextConfig | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    reasoning: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    include: list[str] | None = None
    top_logprobs: int | None = Field(default=None, ge=0)
    truncation: Annotated[str | None, AfterValidator(_not_cut)] = None
    n: Annotated[int | None, AfterValidator(_one)] = None
    best_of: Annotated[int | None, AfterValidator(_one)] = None
    # What is not served here, and fields of the other endpoints.
    background: Refused = None
    reasoning_effort: Refused = None  # here it is reasoning.effort
    prompt: Refused = None
    conversation: Refused = None
    max_tool_calls: Refused = None
    logprobs: Refused = None
    prompt_logprobs: RefusedAny = None
    messages: Refused = None
    documents: Refused = None
    max_tokens: Refused = None
    max_completion_tokens: Refused = None
    echo: Refused = None
    suffix: Refused = None
    continue_final_message: Refused = None
    add_special_tokens: Refused = None
    return_token_ids: Refused = None
    use_beam_search: Refused = None
    response_format: Refused = None  # here it is text.format
    add_generation_prompt: RefusedFalse = None
    system: Refused = None
    thinking: Refused = None
    output_config: Refused = None
    stop_sequences: Refused = None


class OutputText(Model):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = Field(default_factory=list)
    logprobs: list[ContentLogprob] = Field(default_factory=list)


class OutputMessage(Model):
    type: Literal["message"] = "message"
    id: str
    role: Literal["assistant"] = "assistant"
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


OutputItem = OutputMessage | FunctionCallItem | ReasoningItem


class InputTokensDetails(Model):
    cached_tokens: int


class OutputTokensDetails(Model):
    reasoning_tokens: int = 0


class ResponseUsage(Model):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Model):
    reason: Literal["max_output_tokens"]


class Response(Model):
    id: str
    object: Literal["response"] = "response"
    created_at: float
    status: Literal["in_progress", "completed", "incomplete"]
    model: str
    output: list[OutputItem]
    error: None = None
    background: bool = False
    completed_at: float | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = Field(default_factory=dict)
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    prompt_cache_key: str | None = None
    reasoning: dict[str, Any] | None = None
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool = True
    temperature: float = 1.0
    max_tool_calls: int | None = None
    text: dict[str, Any] = Field(default_factory=dict)
    tool_choice: Any = "auto"
    tools: list[dict[str, Any]] = Field(default_factory=list)
    top_logprobs: int = 0
    top_p: float = 1.0
    truncation: str = "disabled"
    user: str | None = None
    usage: ResponseUsage | None = None


class ResponseDeleted(Model):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True
