"""Who keeps what a request names: a conversation's or a stored response's id says its replica."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexinfer.server.stores.kept_ids import replica_of

PATHS = ("/v1/conversations/", "/v1/responses/")
FIELDS = ("conversation", "previous_response_id")


def keeper_of(path: str, fields: Mapping[str, Any]) -> str | None:
    """The replica; None: the request names nothing that one of them keeps."""
    for head in PATHS:
        if path.startswith(head):
            return replica_of(path.removeprefix(head).partition("/")[0])
    for name in FIELDS:
        kept = fields.get(name)
        if isinstance(kept, dict):  # {"id": ..., "ttl": ...}
            kept = kept.get("id")
        if isinstance(kept, str):
            return replica_of(kept)
    return None
