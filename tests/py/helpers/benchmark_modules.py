"""Benchmarks' modules in tests: each folder has names of its own, and some are the same."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@contextlib.contextmanager
def fresh_benchmark_modules() -> Iterator[None]:
    """What is imported of benchmarks/ in here is imported anew, and gone afterwards; what others
    have imported of it is as before: an exception class must stay the one that they know."""
    before = _take()
    try:
        yield
    finally:
        _take()
        sys.modules.update(before)


def _take() -> dict[str, ModuleType]:
    """Out of sys.modules."""
    found = {
        name: module
        for name, module in sys.modules.items()
        if Path(getattr(module, "__file__", None) or "/").parent.parent == BENCHMARKS
    }
    for name in found:
        del sys.modules[name]
    return found
