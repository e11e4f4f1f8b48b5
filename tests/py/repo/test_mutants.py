"""The table of mutants holds: each names a text that is there once, and tests that are there."""

from __future__ import annotations

import fnmatch
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))
import mutants as mutants_module

MUTANTS = mutants_module.read_mutants()


def test_names_are_distinct() -> None:
    assert max(Counter(mutant.name for mutant in MUTANTS).values()) == 1
    assert len(MUTANTS) > 70


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_made_and_has_its_tests(mutant: Any) -> None:
    assert (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1
    assert mutant.old != mutant.new
    assert mutant.tests
    for test in mutant.tests if not mutant.is_cpp else ():
        path, _, name = test.partition("::")
        source = (ROOT / path).read_text(encoding="utf-8")
        assert not name or f"def {name}(" in source
    for pattern in mutant.tests if mutant.is_cpp else ():
        # Between the slashes: before them is the name of the parameters, after them a parameter.
        *_, last = parts = pattern.split("/")
        name = next((part for part in parts if "." in part), last)
        assert fnmatch.filter(names_of_cpp_tests(), name), pattern


@cache
def names_of_cpp_tests() -> list[str]:
    """Suite and name, without parameters."""
    sources = (ROOT / "tests" / "cpp").rglob("*.cpp")
    found = [re.findall(r"TEST(?:_P|_F|)\(\s*(\w+),\s*(\w+)\)", one.read_text()) for one in sources]
    return [f"{suite}.{name}" for tests in found for suite, name in tests]
