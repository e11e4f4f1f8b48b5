"""The small endpoints: models, tokenize, detokenize, health, administration."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from flexinfer.server.protocol.base import Model, TokenId
from flexinfer.server.protocol.chat import MAX_MESSAGES, Documents, Message, Tool
from flexinfer.server.protocol.refused import Refused

MAX_DETOKENIZED = 65_536
"""Decoding them holds up everybody, for about 0.3 us each."""


class ModelCard(Model):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "flexinfer"
    root: str
    parent: str | None = None
    """The model that an adapter belongs to."""
    max_model_len: int


class ModelList(Model):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class LoadAdapterRequest(Model):
    lora_name: str
    lora_path: str
    """A folder on the server's machine."""
    load_inplace: bool = False
    """Whether an adapter of this name is replaced."""
    is_3d_lora_weight: Refused = None


class UnloadAdapterRequest(Model):
    lora_name: str


class TokenizeRequest(Model):
    """A text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(
        default=None, min_length=1, max_length=MAX_MESSAGES, fail_fast=True
    )
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Documents | None = None
    return_token_strs: bool | None = None
    chat_template: Refused = None


class TokenizeAnswer(Model):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Model):
    model: str | None = None
    tokens: list[TokenId] = Field(max_length=MAX_DETOKENIZED, fail_fast=True)


class DetokenizeAnswer(Model):
    prompt: str


class TokenizerInfo(Model):
    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    chat_template: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None


class Status(Model):
    status: str


class Version(Model):
    version: str


class BudgetRequest(Model):
    kv_cache_memory: int | str
    """Bytes, or text such as "512MiB"."""


class BudgetAnswer(Model):
    old_bytes: int
    new_bytes: int
    returned_bytes: int
    num_preempted: int
    seconds: float


class SleepRequest(Model):
    level: Literal[1, 2] = 1


class SleepAnswer(Model):
    returned_bytes: int


class SleepState(Model):
    is_sleeping: bool


class ResetAnswer(Model):
    forgotten_tokens: int


class TraceRequest(Model):
    action: Literal["start", "stop"]
    name: str = Field(default="trace.jsonl", pattern=r"^\w[\w.-]{0,127}$")


class TraceAnswer(Model):
    tracing: bool
    path: str | None = None
