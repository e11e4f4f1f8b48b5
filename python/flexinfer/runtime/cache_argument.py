"""What transformers' forwards call the cache that they take."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
"""`cache` since 5.24; before, attention had one name for it and mixers another."""


def today(name: str) -> str:
    """`cache` for any of its names, another name as it is."""
    return CACHE_ARGUMENTS[0] if name in CACHE_ARGUMENTS else name


@cache
def cache_argument(forward: Callable[..., Any]) -> str | None:
    """The name by which this forward takes a cache; None: it takes none."""
    parameters = inspect.signature(inspect.unwrap(forward)).parameters
    return next((name for name in CACHE_ARGUMENTS if name in parameters), None)
