"""The tables of other servers' tests hold: ours are there, reasons are given, the page counts."""

from __future__ import annotations

import re
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))
import restated

PARTS = restated.parts()


@cache
def names_in(file: str) -> set[str]:
    source = (restated.TESTS / file).read_text(encoding="utf-8")
    return set(re.findall(r"^(?:async )?def (test_\w+)\(", source, re.MULTILINE))


@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part.suite} {part.endpoint}")
def test_what_holds_a_test_of_theirs_is_there(part: Any) -> None:
    for theirs, ours in part.held:
        file, _, name = ours.partition("::")
        assert name in names_in(file), f"{theirs}: there is no {ours}"
    assert all(len(reason.split()) > 1 for reason in part.left_out.values())


def test_the_page_has_the_table() -> None:
    found = restated.TABLE.search(restated.PAGE.read_text(encoding="utf-8"))
    assert found is not None
    assert found[0] == restated.table(), "python scripts/restated.py --write"


def test_no_test_of_theirs_is_named_twice() -> None:
    for path in sorted(restated.FOLDER.glob("*.toml")):
        files = tomllib.loads(path.read_text(encoding="utf-8"))["file"]
        for file in files:
            assert not set(file.get("held", {})) & set(file.get("left_out", {})), file["path"]
        assert len({(file["path"], file["endpoint"]) for file in files}) == len(files)
