"""Allowance: how fast each tenant may use up what all have a part of, such as the event loop."""

from __future__ import annotations

import math
import time


class Allowance:
    """A leaky bucket per tenant. For one event loop."""

    def __init__(self, per_s: float, burst: float, max_delay_s: float = math.inf) -> None:
        """Of any unit: `per_s` for long, and a `burst` at once."""
        self._per_s = per_s
        self._burst_s = burst / per_s
        self._max_delay_s = max_delay_s
        self._paid_until_s: dict[str, float] = {}

    def delay_s(self, tenant: str, amount: float) -> float:
        """How long the tenant is to wait, now that it has used up so much more."""
        now_s = time.monotonic()
        since_s = max(self._paid_until_s.get(tenant, 0.0), now_s - self._burst_s)
        until_s = min(since_s + amount / self._per_s, now_s + self._max_delay_s)
        self._paid_until_s[tenant] = until_s
        return max(0.0, until_s - now_s)
