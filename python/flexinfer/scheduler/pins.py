"""Pins: prefixes kept between requests for as long as memory suffices. No torch.

The manager never evicts what is pinned. That is right for a caller that owns the engine, and wrong
for a server, where idle conversations could hold all memory and no request would run any more. So
these pins give way, least recently kept first, before a request would fail or a smaller budget be
refused; the next turn then computes again what was evicted. Not thread-safe.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flexinfer.scheduler.snapshots import Snapshots

if TYPE_CHECKING:
    from flexinfer.scheduler.request import Request
    from flexinfer.vtensor import VTensorManager

EXPORT_TTL_S = 30.0
"""How long a finished prefill waits for the process that it is for."""


def export_owner(request_id: str) -> str:
    """Who pins what a request has computed, or will find, of another process's."""
    return f"export/{request_id}"


@dataclass(frozen=True, slots=True)
class _Wish:
    """What is to be pinned at waking up."""

    token_ids: Sequence[int]
    ttl_s: float
    cache_salt: str


class Pins:
    """
    Invariants:
    1. An owner has at most one pin, and every pin that was made here is in `_expires_at`.
    2. `_wishes` is empty unless the manager is asleep: it can neither pin nor unpin then.
    """

    def __init__(
        self, manager: VTensorManager, snapshots: Snapshots, *, to_export: bool = False
    ) -> None:
        """to_export: what requests compute is kept for a while when it is recorded."""
        self._manager = manager
        self._to_export = to_export
        self._snapshots = snapshots
        self._expires_at: dict[str, float] = {}  # by owner, least recently kept first
        self._wishes: dict[str, _Wish | None] = {}  # by owner; None: nothing any more
        self.num_released = 0

    def __len__(self) -> int:
        """Pins made here that have neither been dropped nor expired."""
        self._forget_expired()
        return len(self._expires_at)

    def keep(self, owner: str, token_ids: Sequence[int], ttl_s: float, cache_salt: str = "") -> int:
        """Pin what is recorded of `token_ids` for `ttl_s` seconds, in place of what the owner had.
        Returns the pinned tokens; asleep: 0, and pins at `wake_up`."""
        if self._manager.asleep:
            self._wishes[owner] = _Wish(token_ids, ttl_s, cache_salt)
            return 0
        self.drop(owner)
        self._forget_expired()
        num_tokens = self._snapshots.pin_prefix(token_ids, owner, ttl_s, cache_salt)
        self._expires_at[owner] = time.monotonic() + ttl_s
        return num_tokens

    def keep_to_export(self, request: Request) -> None:
        """What is recorded of the request stays until it is exported, if that is what it is for."""
        if self._to_export:
            tokens = request.token_array[: request.num_computed_tokens]
            self.keep(export_owner(request.request_id), tokens, EXPORT_TTL_S, request.cache_salt)

    def drop(self, owner: str) -> None:
        """Let the owner's prefix be evicted, whoever has pinned it; asleep: at `wake_up`. Unknown
        owners are passed over."""
        if self._manager.asleep:
            self._wishes[owner] = None
        else:
            self._expires_at.pop(owner, None)
            self._manager.unpin_prefix(owner)

    def release_oldest(self) -> bool:
        """Unpin for the owner that was served longest ago. False: there is none."""
        while self._expires_at:
            owner = next(iter(self._expires_at))
            del self._expires_at[owner]
            if self._manager.unpin_prefix(owner):
                self.num_released += 1
                return True
        return False

    def wake_up(self) -> None:
        """Do what was asked for while the manager slept. REQUIRES: it is awake."""
        wishes, self._wishes = self._wishes, {}
        for owner, wish in wishes.items():
            if wish is None:
                self.drop(owner)
            else:
                self.keep(owner, wish.token_ids, wish.ttl_s, wish.cache_salt)

    def _forget_expired(self) -> None:
        """The manager has unpinned them by itself."""
        now = time.monotonic()
        expired = [owner for owner, at in self._expires_at.items() if at <= now]
        for owner in expired:
            del self._expires_at[owner]
