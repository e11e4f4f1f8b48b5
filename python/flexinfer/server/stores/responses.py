"""ResponseStore: answers of /v1/responses that can be retrieved, or continued from."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from flexinfer.server.http.errors import APIError
from flexinfer.server.protocol.chat import Message
from flexinfer.server.protocol.responses import Response
from flexinfer.server.stores.shares import Share


@dataclass(frozen=True)
class StoredResponse:
    tenant: str
    response: Response
    messages: tuple[Message, ...]
    """The chat up to and with this answer, without instructions."""
    num_bytes: int
    """About what it holds that no other does: its answer, and the messages that it added."""


@dataclass
class _Shelf:
    """One tenant's, oldest first."""

    entries: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    num_bytes: int = 0

    def pop(self, response_id: str | None = None) -> None:
        """The one of this id; None: the oldest."""
        if response_id is None:
            response_id = next(iter(self.entries))
        self.num_bytes -= self.entries.pop(response_id).num_bytes


class ResponseStore:
    """Keeps each tenant's newest ones, in memory. For one event loop.

    Invariant: no tenant holds more than `share`.
    """

    def __init__(self, share: Share, replica: str | None = None) -> None:
        """`replica`: None for a server alone."""
        self._share = share
        self._replica = replica
        self._shelves: dict[str, _Shelf] = {}

    def put(self, stored: StoredResponse) -> None:
        """Drops the tenant's oldest to make room; what is larger than its share is not kept."""
        shelf = self._shelves.setdefault(stored.tenant, _Shelf())
        shelf.entries[stored.response.id] = stored
        shelf.num_bytes += stored.num_bytes
        while (
            len(shelf.entries) > self._share.num_entries or shelf.num_bytes > self._share.num_bytes
        ):
            shelf.pop()

    def get(self, tenant: str, response_id: str, param: str | None = None) -> StoredResponse:
        """Raises APIError 404 for one that is not there or another's."""
        shelf = self._shelves.get(tenant)
        found = shelf.entries.get(response_id) if shelf else None
        if found is None:
            gone = ", or its replica has gone, and it with it" if self._replica else ""
            raise APIError(
                404,
                f"there is no response {response_id!r}; it may be too old, or was not stored{gone}",
                param=param,
                code="response_not_found",
            )
        return found

    def delete(self, tenant: str, response_id: str) -> None:
        """Raises APIError 404 as `get`."""
        found = self.get(tenant, response_id)
        self._shelves[tenant].pop(found.response.id)
