"""What requests and answers of several endpoints have in common: strict models, errors, usage."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=64)],
        Annotated[str, Field(max_length=512)],
    ],
    Field(max_length=16),
]
"""As large as OpenAI allows it: it is kept."""


class Model(BaseModel):
    """A number is not a string, nor a string a number. What validates is made at the first use: of
    all kinds that is 10 MiB, of which a server needs a few."""

    model_config = ConfigDict(strict=True, populate_by_name=True, defer_build=True)


class ErrorDetail(Model):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(Model):
    error: ErrorDetail


class PromptTokensDetails(Model):
    cached_tokens: int = 0
    """Prompt tokens whose KV was found in the prefix cache."""


class CompletionTokensDetails(Model):
    reasoning_tokens: int = 0


class Usage(Model):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None
    """Where the server tells reasoning from the rest."""


class PromptLogprob(Model):
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By token id."""

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]
