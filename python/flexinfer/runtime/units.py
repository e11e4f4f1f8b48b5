"""Sizes in bytes and numbers of tokens, as people write them."""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_bytes(size: int | str, name: str = "size") -> int:
    """Bytes of ``size``: an integer, or text such as ``"64KiB"``, ``"1.5GiB"``, ``"512M"``; less
    than 2**63."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]?)(?:i?B)?\s*", str(size), re.IGNORECASE)
    try:
        if isinstance(size, int) and not isinstance(size, bool):
            num_bytes = size
        else:
            num_bytes = int(float(match[1]) * _UNITS[match[2].upper()])  # type: ignore[index]
        if not 0 <= num_bytes < 1 << 63:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            f"{name} is a number of bytes from 0 to 2**63 - 1, or text like '64MiB', got {size!r}"
        ) from None
    return num_bytes


_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_count(name: str, text: str) -> int:
    """The number that ``"8192"``, ``"8k"`` (8,000), ``"8K"`` (8,192) or ``"25.6k"`` is, as vLLM
    reads it: letters in lower case are powers of 1,000, capitals those of 1,024."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)([kmgKMG]?)\s*", text)
    number = Fraction(match[1]) * _COUNTS[match[2]] if match else None
    if number is None or number.denominator != 1:
        raise ValueError(
            f"{name} must be an integer, or text like '8192', '8k' or '8K', got {text!r}"
        )
    return number.numerator
