"""docs/module_map.md names every source file, once, and no file that is gone."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

from module_map import MAP, ROW, source_files


def rows() -> list[tuple[str, str]]:
    return ROW.findall(MAP.read_text())


def test_every_source_file_has_one_row() -> None:
    count = Counter(name for name, _ in rows())
    missing = sorted(source_files().keys() - count.keys())
    assert not missing, f"run `make map`, then look at the sentences of: {missing}"
    assert max(count.values()) == 1


def test_no_row_names_a_file_that_is_gone() -> None:
    gone = sorted({name for name, _ in rows()} - source_files().keys())
    assert not gone, f"run `make map`: {gone}"


def test_every_row_says_something() -> None:
    empty = [name for name, text in rows() if len(text.split()) < 3 or "to be described" in text]
    assert not empty
