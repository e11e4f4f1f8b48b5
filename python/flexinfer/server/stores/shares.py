"""Shares: what each tenant may have the server keep, in number and bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """Of one tenant: no other can use it up."""

    num_entries: int
    num_bytes: int


def equal_share(num_entries: int, num_bytes: int, num_tenants: int) -> Share:
    """At least one entry each."""
    return Share(max(1, num_entries // num_tenants), num_bytes // num_tenants)
