"""Random numbers by counter: number `counter` of the stream `seed`, whatever was drawn before it.

A token's number depends on its request's seed and its place in the sequence alone: not on the rest
of the batch, nor on steps that preemption repeats, and nothing has to be kept between two of them.
The function is SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def derive_seed(seed: int, index: int) -> int:
    """The seed of stream number `index` of an engine that has this seed itself; 64 bits."""
    return _mix(_mix(seed & _MASK) + _GOLDEN * (index + 1))


def uniforms(seeds: Sequence[int], counters: Sequence[int]) -> list[float]:
    """Numbers in [0, 1), multiples of 2**-24, one for each (seed, counter)."""
    import numpy as np

    streams = np.array([seed & _MASK for seed in seeds], dtype=np.uint64)
    places = np.array(counters, dtype=np.uint64) + np.uint64(1)
    bits = _mix_all(_mix_all(streams) + places * np.uint64(_GOLDEN))
    numbers: list[float] = ((bits >> np.uint64(40)) * 2.0**-24).tolist()
    return numbers


def _mix_all(values: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> Any:
    """`_mix` of each; products wrap around."""
    import numpy as np

    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _mix(value: int) -> int:
    """A permutation of 64-bit numbers that spreads each bit over all."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
