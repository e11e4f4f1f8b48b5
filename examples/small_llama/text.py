"""Text that every machine with Python has: the sources and the documentation of its standard
library, and the licences that Debian brings. Some files are held out, to measure with."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

LEFT_OUT = {"site-packages", "test", "tests", "idle_test", "encodings", "lib2to3", "__pycache__"}
"""Folders of other people's packages, of tests, and of tables."""
LICENCES = Path("/usr/share/common-licenses")
HELD_OUT_EVERY = 24
"""One file in so many is held out, by a digest of its name."""
MIN_CHARS, MAX_CHARS = 400, 400_000


def files() -> Iterator[tuple[str, str]]:
    """Name and text of each, in the order of the names."""
    root = Path(sysconfig.get_path("stdlib"))
    sources = sorted(path for path in root.rglob("*.py") if not LEFT_OUT & set(path.parts))
    licences = sorted(path for path in LICENCES.glob("*") if path.is_file())
    for path in (*sources, *licences):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if path.name == "topics.py":  # the language's reference, as a dict
            text = text.replace("\\n", "\n")
        if len(text) >= MIN_CHARS:
            yield path.name, text[:MAX_CHARS]


def is_held_out(name: str) -> bool:
    """Whether this file is kept from the training."""
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_EVERY == 0


def training_texts() -> list[str]:
    return [text for name, text in files() if not is_held_out(name)]


def held_out_texts() -> list[str]:
    return [text for name, text in files() if is_held_out(name)]
