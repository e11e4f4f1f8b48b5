"""Numbers that callers give: of Python, numpy or torch, which none of this imports.

Each function gives Python's own kind, or raises ValueError with the name and the value. A bool is
no number, and a text never stands for one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from operator import index
from typing import Any


def whole(name: str, value: Any) -> int:
    """An integer."""
    try:
        if _is_bool(value) or _is_array(value):
            raise TypeError
        return index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {value!r}") from None


def positive(name: str, value: Any, most: int | None = None) -> int:
    """An integer from 1 to `most`."""
    try:
        number = whole(name, value)
    except ValueError:
        number = 0
    if number < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    if most is not None and number > most:
        raise ValueError(f"{name} must be at most {most}, got {number}")
    return number


def real(name: str, value: Any) -> float:
    """A finite number."""
    try:
        if _is_bool(value) or _is_array(value) or isinstance(value, (str, bytes)):
            raise TypeError
        number = float(value)
        if not math.isfinite(number):
            raise ValueError
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last is torch's
        raise ValueError(f"{name} must be a finite number, got {value!r}") from None
    return number


def flag(name: str, value: Any) -> bool:
    """True or False."""
    if not _is_bool(value):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def whole_list(name: str, given: Any) -> list[int]:
    """Integers, of a sequence of them or an array."""
    items = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(items, (str, bytes, Mapping)) or not isinstance(items, Iterable):
        raise ValueError(f"{name} must be a list of integers, got {given!r}")
    return [
        item if type(item) is int else whole(f"{name}[{place}]", item)
        for place, item in enumerate(items)
    ]


def _is_bool(value: Any) -> bool:
    is_scalar = str(getattr(value, "dtype", "")).endswith("bool") and not _is_array(value)
    return isinstance(value, bool) or is_scalar


def _is_array(value: Any) -> bool:
    """Of however few numbers: torch takes one of one, a bool too, for a number."""
    return bool(getattr(value, "ndim", 0))
