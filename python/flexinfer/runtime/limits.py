"""MachineLimits: how fast this machine can read and multiply at most, measured.

No part of a step can take less time than its bytes at the one rate and its arithmetic at the other
(Williams et al., "Roofline", 2009).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

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


def measure_limits(dtype: torch.dtype) -> MachineLimits:
    """Of the CPU, by the best of several rounds of torch's own products; about two seconds.

    Numbers of any dtype can be multiplied as float32: it counts where that is faster.
    """
    memory = torch.ones(MATRIX_SIZE, READ_BYTES // 4 // MATRIX_SIZE)
    vector = torch.ones(memory.shape[1])
    square = torch.ones(MATRIX_SIZE, MATRIX_SIZE)
    factors = [square] if dtype == square.dtype else [square, square.to(dtype)]
    product_s = min(_best_s(partial(torch.mm, x, x)) for x in factors)
    if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        # On AMD's CPUs it has twice the speed of MKL, which torch.mm takes in float32.
        packed = torch.ops.mkldnn._reorder_linear_weight(square)
        multiply = torch.ops.mkldnn._linear_pointwise
        product_s = min(product_s, _best_s(lambda: multiply(square, packed, None, "none", [], "")))
    # On AMD's CPUs MKL, which torch.mv takes, reads at two thirds of what a sum does.
    read_s = min(_best_s(lambda: torch.mv(memory, vector)), _best_s(memory.sum))
    return MachineLimits(
        bytes_per_s=READ_BYTES / read_s,
        flops_per_s=2 * MATRIX_SIZE**3 / product_s,
    )


def _best_s(call: Callable[[], object]) -> float:
    rounds = []
    for _ in range(NUM_ROUNDS):
        start_s = time.perf_counter()
        call()
        rounds.append(time.perf_counter() - start_s)
    return min(rounds)
