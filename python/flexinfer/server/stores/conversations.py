"""ConversationStore: dialogues whose KV stays pinned between their turns, for a time to live.

A pin holds chunks but no slot. A fork is a second pin: it costs nothing until its branches are
written (docs/design.md, "Conversations"). When memory is short pins give way, the longest idle
first (flexinfer/scheduler/pins.py): the next turn computes its past again. For one event loop.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from flexinfer.async_llm import AsyncLLM
from flexinfer.engine.llm_engine import LLMEngine
from flexinfer.server.http.errors import APIError, bad_request
from flexinfer.server.protocol.chat import Message
from flexinfer.server.settings import ServerSettings
from flexinfer.server.stores.kept_ids import kept_id
from flexinfer.server.stores.shares import equal_share

BYTES_PER_TOKEN = 36
"""Of a list of Python's integers."""


@dataclass
class Conversation:
    """What was said, and the tokens whose KV is pinned."""

    id: str
    tenant: str
    ttl_s: float
    created: int
    expires_at: float
    """By `time.monotonic`."""
    metadata: dict[str, str] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    cache_salt: str = ""
    num_pinned_tokens: int = 0
    is_busy: bool = False
    """A turn is being computed; a second one would not know what the first said."""

    @property
    def num_bytes(self) -> int:
        """About what it holds."""
        texts = sum(message.num_bytes for message in self.messages)
        return texts + BYTES_PER_TOKEN * len(self.token_ids)


class ConversationStore:
    """
    Invariant: a conversation's pin ends with it, at `expires_at` or when it is deleted.
    """

    def __init__(self, llm: AsyncLLM, settings: ServerSettings, replica: str | None = None) -> None:
        """`replica`: None for a server alone."""
        self._llm = llm
        self._settings = settings
        self._replica = replica
        self._share = equal_share(
            settings.max_conversations, settings.max_stored_bytes, settings.num_tenants
        )
        self._all: dict[str, Conversation] = {}

    def create(
        self,
        tenant: str,
        ttl_s: float | None,
        messages: Sequence[Message] = (),
        metadata: dict[str, str] | None = None,
    ) -> Conversation:
        """Raises APIError when there are too many, or no prefix cache."""
        if not self._llm.config.enable_prefix_caching:
            raise bad_request("conversations keep their prefix, and this server caches none")
        self._forget_expired()
        ttl_s = self._ttl(ttl_s)
        self._check_share(tenant, messages)
        conversation = Conversation(
            id=kept_id("conv", self._replica),
            tenant=tenant,
            ttl_s=ttl_s,
            created=int(time.time()),
            expires_at=time.monotonic() + ttl_s,
            metadata=dict(metadata or {}),
            messages=list(messages),
        )
        self._all[conversation.id] = conversation
        return conversation

    def get(self, tenant: str, conversation_id: str) -> Conversation:
        """Raises APIError 404 for one that is not there, has expired, or is another's."""
        self._forget_expired()
        found = self._all.get(conversation_id)
        if found is None or found.tenant != tenant:
            gone = ", or its replica has gone, and it with it" if self._replica else ""
            raise APIError(
                404,
                f"there is no conversation {conversation_id!r}; it may have expired{gone}",
                param="conversation",
                code="conversation_not_found",
            )
        return found

    def begin_turn(self, tenant: str, conversation_id: str, ttl_s: float | None) -> Conversation:
        """Mark it busy; `end_turn` must follow. Raises APIError, 409 if it is already."""
        found = self.get(tenant, conversation_id)
        if found.is_busy:
            raise APIError(
                409, f"conversation {found.id} has a turn in progress", code="conversation_busy"
            )
        self._check_share(tenant, (), num_new=0)
        if ttl_s is not None:
            found.ttl_s = self._ttl(ttl_s)
        found.is_busy = True
        return found

    def end_turn(self, conversation: Conversation) -> None:
        conversation.is_busy = False

    async def keep(
        self,
        conversation: Conversation,
        messages: Sequence[Message],
        token_ids: Sequence[int],
        cache_salt: str,
    ) -> None:
        """A turn has ended well: these are its messages, and the tokens to pin from now on."""
        conversation.messages = list(messages)
        conversation.token_ids = list(token_ids)
        conversation.cache_salt = cache_salt
        await self._pin(conversation)

    async def fork(self, conversation: Conversation) -> Conversation:
        """A second one with the same past."""
        fork = self.create(
            conversation.tenant,
            conversation.ttl_s,
            conversation.messages,
            conversation.metadata,
        )
        fork.token_ids = list(conversation.token_ids)
        fork.cache_salt = conversation.cache_salt
        await self._pin(fork)
        return fork

    async def delete(self, conversation: Conversation) -> None:
        """Also while a turn is under way: that is answered, and pins nothing any more."""
        self._all.pop(conversation.id, None)
        await self._llm.call(lambda engine: engine.scheduler.pins.drop(conversation.id))

    async def _pin(self, conversation: Conversation) -> None:
        """Pin what is recorded of its tokens, in place of the turn before."""
        conversation.expires_at = time.monotonic() + conversation.ttl_s
        if not conversation.token_ids or conversation.id not in self._all:
            return

        def pin(engine: LLMEngine) -> int:
            # One function between two steps: nothing can evict what is unpinned meanwhile.
            return engine.scheduler.pins.keep(
                conversation.id,
                conversation.token_ids,
                conversation.ttl_s,
                conversation.cache_salt,
            )

        conversation.num_pinned_tokens = await self._llm.call(pin)

    def _check_share(self, tenant: str, messages: Sequence[Message], num_new: int = 1) -> None:
        """Raises APIError 429 if `num_new` with these messages would be too much for the tenant."""
        held = [one for one in self._all.values() if one.tenant == tenant]
        num_bytes = sum(one.num_bytes for one in held) + sum(one.num_bytes for one in messages)
        share = self._share
        if len(held) + num_new <= share.num_entries and num_bytes <= share.num_bytes:
            return
        raise APIError(
            429,
            f"{len(held)} conversations are kept, of at most {share.num_entries} and "
            f"{share.num_bytes} bytes: delete some, or let them expire",
            code="too_many_conversations",
            headers={"Retry-After": "60"},
        )

    def _ttl(self, ttl_s: float | None) -> float:
        ttl_s = self._settings.conversation_ttl_s if ttl_s is None else ttl_s
        if not 0 < ttl_s <= self._settings.max_ttl_s:
            raise bad_request(f"ttl must be in (0, {self._settings.max_ttl_s:g}] seconds", "ttl")
        return ttl_s

    def _forget_expired(self) -> None:
        """Their pins expire by themselves, in the manager."""
        now = time.monotonic()
        for conversation in list(self._all.values()):
            if conversation.expires_at <= now and not conversation.is_busy:
                del self._all[conversation.id]
