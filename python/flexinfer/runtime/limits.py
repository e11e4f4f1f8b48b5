"""MachineLimits: how fast this machine can read and multiply at most, measured.

No part of a step can take less time than its bytes at the one rate and its arithmetic at the other
(Williams et al., "Roofline", 2009).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

READ_BYTES = 256 << 20
"""Far more than any cache holds."""
MATRIX_SIZE = 2048
NUM_ROUNDS = 7


@dataclass(frozen=True, slots=True)
class MachineLimits:
    bytes_per_s: float
    """Reading memory, with torch's threads."""
    flops_per_s: float
    """Multiplying matrices of one dtype; a product and a sum count as two."""

    def seconds(self, flops: float, num_bytes: float) -> float:
        """The least that such work takes."""
        return max(flops / self.flops_per_s, num_bytes / self.bytes_per_s)


def measure_limits(
    dtype: torch.dtype, multiplier: Callable[[torch.Tensor], Callable[[torch.Tensor], object]]
) -> MachineLimits:
    """Of the CPU, by the best of several rounds; about two seconds.

    multiplier: makes of a weight [out, in] what multiplies rows with it, as a model's layers do;
    torch's own product has half of oneDNN's speed in float32 on AMD's CPUs.
    """
    memory = torch.ones(MATRIX_SIZE, READ_BYTES // 4 // MATRIX_SIZE)
    vector = torch.ones(memory.shape[1])
    square = torch.ones(MATRIX_SIZE, MATRIX_SIZE, dtype=dtype)
    multiply = multiplier(square)
    product_s = min(
        _best_s(lambda: torch.mm(square, square)),
        _best_s(lambda: multiply(square)),
    )
    return MachineLimits(
        bytes_per_s=READ_BYTES / _best_s(lambda: torch.mv(memory, vector)),
        flops_per_s=2 * MATRIX_SIZE**3 / product_s,
    )


def _best_s(call: Callable[[], object]) -> float:
    rounds = []
    for _ in range(NUM_ROUNDS):
        start_s = time.perf_counter()
        call()
        rounds.append(time.perf_counter() - start_s)
    return min(rounds)
