"""ResponseStore: answers of /v1/responses that may be asked for again, or gone on from."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from flexinfer.server.http.errors import APIError
from flexinfer.server.protocol.chat import Message
from flexinfer.server.protocol.responses import Response


@dataclass(frozen=True)
class StoredResponse:
    tenant: str
    response: Response
    messages: tuple[Message, ...]
    """The chat up to and with this answer, without instructions."""


class ResponseStore:
    """Keeps the newest ones, in memory. For one event loop."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._all: OrderedDict[str, StoredResponse] = OrderedDict()

    def put(self, stored: StoredResponse) -> None:
        self._all[stored.response.id] = stored
        while len(self._all) > self._capacity:
            self._all.popitem(last=False)

    def get(self, tenant: str, response_id: str, param: str | None = None) -> StoredResponse:
        """Raises APIError 404 for one that is not there or another's."""
        found = self._all.get(response_id)
        if found is None or found.tenant != tenant:
            raise APIError(
                404,
                f"there is no response {response_id!r}; it may be too old, or was not stored",
                param=param,
                code="response_not_found",
            )
        return found

    def delete(self, tenant: str, response_id: str) -> None:
        del self._all[self.get(tenant, response_id).response.id]
