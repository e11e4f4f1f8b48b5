"""Card: what fits into the memory of the GPU at hand, be it of 24, 80 or 141 GB.

Benchmarks ask for what they would like, largest last, and get what fits; what is left out is said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

SPARE_BYTES = 4 << 30
"""Left to queries, outputs, activations, CUDA graphs and libraries."""
T = TypeVar("T")


def usable_bytes(device: str) -> int | None:
    """What KV may take now, torch's unused memory given back; None: nobody counts, on a CPU."""
    if device != "cuda":
        return None
    import torch

    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0]) - SPARE_BYTES


def shrink(
    wanted: T, smaller: Callable[[T], T], needed_bytes: Callable[[T], int], usable: int | None
) -> T:
    """`wanted`, made smaller until it fits or cannot be made smaller."""
    while usable is not None and needed_bytes(wanted) > usable:
        less = smaller(wanted)
        if less == wanted:
            break
        wanted = less
    return wanted


def fitting(
    wanted: Sequence[T], needed_bytes: Callable[[Sequence[T]], int], usable: int | None
) -> tuple[tuple[T, ...], tuple[T, ...]]:
    """Those that fit together, in their order, and those left out: each is judged with all before
    it that were taken."""
    taken: list[T] = []
    left: list[T] = []
    for one in wanted:
        fits = usable is None or needed_bytes([*taken, one]) <= usable
        (taken if fits else left).append(one)
    return tuple(taken), tuple(left)
