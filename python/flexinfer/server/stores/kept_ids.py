"""Ids of what a server keeps from one request to the next. Among replicas they name the one that
does, so that whoever sees an id knows whom to ask."""

from __future__ import annotations

import re

from flexinfer.server.observability.logs import new_id

NAMING = re.compile(r"(?:conv|resp)_([^_]+)_[0-9a-f]+")


def kept_id(kind: str, replica: str | None) -> str:
    """`kind`: conv, resp. `replica`: None for a server alone."""
    return f"{kind}_{new_id()}" if replica is None else f"{kind}_{replica}_{new_id()}"


def replica_of(kept: str) -> str | None:
    """None: the id names none."""
    found = NAMING.fullmatch(kept)
    return None if found is None else found[1]
