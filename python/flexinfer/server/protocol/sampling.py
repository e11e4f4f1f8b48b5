"""How tokens are chosen: the fields that all endpoints with an answer share, honoured or refused.

Names and defaults are OpenAI's, those of extensions vLLM's; some are aliases that SGLang and
llama.cpp have. What is not served is in refused.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from flexinfer.server.protocol.base import Model, TokenId
from flexinfer.server.protocol.refused import Refused, RefusedFields


class StreamOptions(Model):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class JsonSchemaFormat(Model):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Model):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    """With json_object, as llama.cpp has it."""


class StructuredOutputs(Model):
    """Exactly one of them; see flexinfer.sampling.grammars."""

    json_: dict[str, Any] | str | bool | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(default=None, min_length=1, fail_fast=True)
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: Refused = None
    disable_any_whitespace: Refused = None
    disable_additional_properties: Refused = None
    structural_tag: Refused = None


def _not_none_of_it(value: int | None) -> int | None:
    if value == 0:
        raise ValueError("0 would leave nothing of the prompt")
    return value


class SamplingFields(RefusedFields):
    """None leaves the default to the server."""

    model: str | None = None
    n: int | None = Field(default=None, ge=1)
    best_of: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=1e-6, le=1e6)
    logit_bias: dict[str, float] | None = Field(default=None, max_length=4096)
    allowed_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = None
    bad_words: Annotated[list[str], Field(fail_fast=True)] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(default=None, ge=0)
    skip_special_tokens: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    output_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = None
    """An answer that was begun elsewhere: it goes on after these tokens, and repeats their text."""
    truncate_prompt_tokens: Annotated[int | None, AfterValidator(_not_none_of_it)] = Field(
        default=None, ge=-1
    )
    """Keep only so many tokens of the prompt: the last ones, unless `truncation_side` says so. -1:
    as many as leave room for the answer."""
    truncation_side: Literal["left", "right"] | None = None
    """Where tokens are taken away."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(default=None, min_length=1, fail_fast=True)
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    @property
    def wants_stream(self) -> bool:
        return bool(self.stream)

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        """With each event, where usage is told at all."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)
