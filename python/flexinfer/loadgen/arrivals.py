"""Arrivals: when the requests of a load are issued, in seconds from its start."""

from __future__ import annotations

import math
import random


def gamma_arrivals(
    num_requests: int, request_rate: float, burstiness: float, rng: random.Random
) -> list[float]:
    """Gamma-distributed gaps of mean 1 / `request_rate`, as `vllm bench serve` has them.

    `burstiness` is the shape: 1 is a Poisson process, less is burstier, more is steadier. An
    infinite rate issues all at once. Raises ValueError for what is not positive.
    """
    if not request_rate > 0 or math.isnan(request_rate):
        raise ValueError(f"--request-rate must be positive or inf, got {request_rate}")
    if not 0 < burstiness < math.inf:
        raise ValueError(f"--burstiness must be positive, got {burstiness}")
    if math.isinf(request_rate):
        return [0.0] * num_requests
    scale = 1.0 / (request_rate * burstiness)
    now_s, arrivals = 0.0, []
    for _ in range(num_requests):
        now_s += rng.gammavariate(burstiness, scale)
        arrivals.append(now_s)
    return arrivals
