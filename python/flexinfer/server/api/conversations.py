"""`/v1/conversations`: dialogues that the server remembers, and whose KV stays pinned."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path

from flexinfer.server.api.input_items import messages_of
from flexinfer.server.chat_renderer import check_num_chars
from flexinfer.server.http.json_route import JsonRoute
from flexinfer.server.protocol.conversations import (
    ConversationAnswer,
    ConversationDeleted,
    ConversationRequest,
)
from flexinfer.server.state import State, Tenant
from flexinfer.server.stores.conversations import Conversation

router = APIRouter(prefix="/v1/conversations", tags=["conversations"], route_class=JsonRoute)
ConversationId = Annotated[str, Path(max_length=128)]


@router.post("")
async def create(
    state: State, tenant: Tenant, body: ConversationRequest | None = None
) -> ConversationAnswer:
    """A new one. It goes on through the field `conversation` of chat completions."""
    state.check_serving(None)
    wanted = body or ConversationRequest()
    messages = [*(wanted.messages or ()), *messages_of(wanted.items or ())]
    check_num_chars(sum(len(one.text) for one in messages), state.llm.inputs, "messages")
    made = state.conversations.create(tenant, wanted.ttl, messages, wanted.metadata)
    return _answer(made)


@router.get("/{conversation_id}")
async def get(state: State, tenant: Tenant, conversation_id: ConversationId) -> ConversationAnswer:
    return _answer(state.conversations.get(tenant, conversation_id))


@router.post("/{conversation_id}/fork")
async def fork(state: State, tenant: Tenant, conversation_id: ConversationId) -> ConversationAnswer:
    """A second conversation with the same past. No KV is computed or copied."""
    found = state.conversations.get(tenant, conversation_id)
    return _answer(await state.conversations.fork(found))


@router.delete("/{conversation_id}")
async def delete(
    state: State, tenant: Tenant, conversation_id: ConversationId
) -> ConversationDeleted:
    found = state.conversations.get(tenant, conversation_id)
    await state.conversations.delete(found)
    return ConversationDeleted(id=found.id)


def _answer(found: Conversation) -> ConversationAnswer:
    return ConversationAnswer(
        id=found.id,
        created_at=found.created,
        ttl=found.ttl_s,
        metadata=found.metadata,
        messages=found.messages,
        pinned_tokens=found.num_pinned_tokens,
    )
