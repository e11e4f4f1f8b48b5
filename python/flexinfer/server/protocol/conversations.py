"""What `/v1/conversations` takes and answers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from flexinfer.server.protocol.base import Model
from flexinfer.server.protocol.chat import Message


class ConversationRequest(Model):
    ttl: float | None = Field(default=None, gt=0)
    """Seconds after its last turn until it is forgotten."""
    messages: list[Message] | None = None
    """How it begins, such as with a system message."""
    metadata: dict[str, str] | None = Field(default=None, max_length=16)


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
