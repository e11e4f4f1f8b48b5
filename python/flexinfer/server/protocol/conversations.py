"""What `/v1/conversations` takes and answers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from flexinfer.server.protocol.base import Metadata, Model
from flexinfer.server.protocol.chat import MAX_MESSAGES, Message
from flexinfer.server.protocol.responses import InputItems


class ConversationRequest(Model):
    ttl: float | None = Field(default=None, gt=0)
    """Seconds after its last turn until it is forgotten."""
    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    """How it begins, such as with a system message."""
    items: InputItems | None = None
    """The same in the shape of `/v1/responses`, as OpenAI has it."""
    metadata: Metadata | None = None


class ConversationAnswer(Model):
    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    ttl: float
    metadata: dict[str, str]
    messages: list[Message]
    pinned_tokens: int


class ConversationDeleted(Model):
    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: bool = True
