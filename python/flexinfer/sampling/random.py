"""Random numbers by counter: number `counter` of the stream `seed`, whatever was drawn before it.

A token's number depends on its request's seed and its place in the sequence alone: not on the rest
of the batch, nor on steps that preemption repeats, and nothing has to be kept between two of them.
The function is SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
"""

from __future__ import annotations

from collections.abc import Sequence

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def derive_seed(seed: int, index: int) -> int:
    """The seed of stream number `index` of an engine that has this seed itself; 64 bits."""
    return _mix(_mix(seed & _MASK) + _GOLDEN * (index + 1))


def uniforms(seeds: Sequence[int], counters: Sequence[int]) -> list[float]:
    """Numbers in [0, 1), multiples of 2**-24, one for each (seed, counter)."""
    return [uniform(seed, counter) for seed, counter in zip(seeds, counters, strict=True)]


def uniform(seed: int, counter: int) -> float:
    """A multiple of 2**-24 in [0, 1)."""
    return (_mix(_mix(seed & _MASK) + _GOLDEN * (counter + 1)) >> 40) * 2.0**-24


def _mix(value: int) -> int:
    """A permutation of 64-bit numbers that spreads each bit over all."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
