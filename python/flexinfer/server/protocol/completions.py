"""What `/v1/completions` takes and answers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from flexinfer.server.protocol.base import FinishReason, Model, PromptLogprobs, TokenId, Usage
from flexinfer.server.protocol.refused import Refused, RefusedDisabled
from flexinfer.server.protocol.sampling import SamplingFields


class CompletionRequest(SamplingFields):
    # Which of them it is shows in the first element: no need to find fault with all of them.
    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[TokenId], Field(fail_fast=True)]
        | Annotated[list[Annotated[list[TokenId], Field(fail_fast=True)]], Field(fail_fast=True)]
    )
    max_tokens: int | None = Field(default=16, ge=0)
    logprobs: int | None = Field(default=None, ge=-1)
    """-1: all, where the server admits so many."""
    prompt_logprobs: int | None = Field(default=None, ge=-1)
    echo: bool | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    # Fields of the other endpoints.
    reasoning_effort: Refused = None
    messages: Refused = None
    documents: Refused = None
    max_completion_tokens: Refused = None
    top_logprobs: Refused = None
    tools: Refused = None
    tool_choice: Refused = None
    conversation: Refused = None
    continue_final_message: Refused = None
    chat_template_kwargs: Refused = None
    input: Refused = None
    instructions: Refused = None
    max_output_tokens: Refused = None
    text: Refused = None
    previous_response_id: Refused = None
    reasoning: Refused = None
    include_reasoning: Refused = None
    add_generation_prompt: Refused = None
    system: Refused = None
    thinking: Refused = None
    output_config: Refused = None
    stop_sequences: Refused = None
    include: Refused = None
    truncation: RefusedDisabled = None
    background: Refused = None
    max_tool_calls: Refused = None


class CompletionLogprobs(Model):
    """All lists have an entry for each token of the text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Model):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(Model):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str | None = None
    usage: Usage | None = None
