"""Text of a model or a user, made safe for a terminal."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """`text` without control characters other than newline and tab."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def one_row(text: str) -> str:
    """`text` on one line."""
    return " ".join(printable(text).split())


def size_text(num_bytes: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"


def ms_text(seconds: float | None) -> str:
    """0.0123 -> '12.3'."""
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"
