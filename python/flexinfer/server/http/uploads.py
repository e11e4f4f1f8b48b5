"""Uploads: how fast one tenant's large bodies are taken in.

What arrives takes of the event loop, whatever is made of it later: four connections that sent as
fast as they could took a third of it. So a tenant may send a burst, and after it is read at a pace;
what it sends faster waits in its own sockets.
"""

from __future__ import annotations

import time

BYTES_PER_S = 4 << 20
"""A million of tokens: no engine computes as many."""
BURST_BYTES = 8 << 20


class Uploads:
    """A leaky bucket per tenant. For one event loop."""

    def __init__(self) -> None:
        self._paid_until_s: dict[str, float] = {}

    def delay_s(self, tenant: str, num_bytes: int) -> float:
        """How long to wait before the tenant's next bytes are read, now that `num_bytes` were."""
        now_s = time.monotonic()
        since_s = max(self._paid_until_s.get(tenant, 0.0), now_s - BURST_BYTES / BYTES_PER_S)
        self._paid_until_s[tenant] = since_s + num_bytes / BYTES_PER_S
        return max(0.0, self._paid_until_s[tenant] - now_s)
