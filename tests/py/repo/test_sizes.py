"""Files, functions and lines of text are bounded: a reader takes one screen at a time."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_TEXT_COLUMNS = 120
CODE = ("cpp", "python", "benchmarks", "examples", "scripts")
PAGES = sorted(
    path
    for place in (".", "docs", "benchmarks", "benchmarks/*", "examples/*")
    for path in ROOT.glob(f"{place}/*.md")
)

# What is still too long. Rows are only ever taken away.
LONG_FILES: set[str] = set()
LONG_FUNCTIONS = {"benchmarks/kernels/triton_kernel.py:_attend"}
LONG_BLOCKS = {
    "tests/cpp/core/cuda_steps_test.cpp",  # a table of operations
    "tests/cpp/core/swap_fault_test.cpp",  # the same
}


def sources(*endings: str, folders: tuple[str, ...] = CODE) -> Iterator[Path]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in endings:
                yield path


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and lines, decorators apart, of every function of a Python file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or 0) - node.lineno + 1


def test_no_source_file_is_longer_than_a_reader_follows() -> None:
    long = {
        path.relative_to(ROOT).as_posix()
        for path in sources(".py", ".h", ".cpp", ".sh", ".js", ".css", folders=(*CODE, "tests"))
        if len(path.read_text().splitlines()) > MAX_FILE_LINES
    }
    assert long - LONG_FILES == set(), "split it"


def test_no_python_function_is_longer_than_a_screen() -> None:
    long = {
        f"{path.relative_to(ROOT).as_posix()}:{name}"
        for path in sources(".py", folders=(*CODE, "tests"))
        for name, num_lines in functions(path)
        if num_lines > MAX_FUNCTION_LINES
    }
    assert long - LONG_FUNCTIONS == set(), "split it"


NO_CODE = re.compile(r"""//.*|`[^`]*`|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])'""")
NO_FUNCTION = re.compile(r"\b(?:namespace|class|struct|enum|union|extern)\b|(?:=|\breturn) *\{$")


def blocks(path: Path) -> Iterator[int]:
    """How many lines each pair of braces takes, those of classes and tables apart."""
    text = re.sub(r"(?s)/\*.*?\*/|`[^`]*`", lambda m: "\n" * m[0].count("\n"), path.read_text())
    begun: list[tuple[int, str]] = []
    for number, line in enumerate(NO_CODE.sub("", row) for row in text.splitlines()):
        for brace in re.findall("[{}]", line):
            if brace == "{":
                begun.append((number, line.rstrip()))
            elif begun:
                first, head = begun.pop()
                if not NO_FUNCTION.search(head):
                    yield number - first + 1


def test_no_function_of_the_core_or_the_page_is_longer_than_a_screen() -> None:
    long = {
        path.relative_to(ROOT).as_posix()
        for path in sources(".h", ".cpp", ".js", folders=(*CODE, "tests"))
        if max(blocks(path), default=0) > MAX_FUNCTION_LINES
    }
    assert long - LONG_BLOCKS == set(), "split it"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_lines_of_text_fit_a_screen(page: Path) -> None:
    """Rows of tables apart, which Markdown cannot break."""
    lines = enumerate(page.read_text().splitlines(), 1)
    assert [n for n, line in lines if len(line) > MAX_TEXT_COLUMNS and line[:1] != "|"] == []


PLACES = re.compile(
    r"(?<![\w/.<-])((?:cpp|python|tests|benchmarks|scripts|examples|docs|dashboards)/[\w./-]*\w)(?![\w*])"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    """A C++ header and its source may be named together, without an ending."""
    names = set(PLACES.findall(page.read_text()))
    gone = {
        name
        for name in names
        if not any((ROOT / f"{name}{ending}").exists() for ending in ("", ".h", ".py"))
    }
    assert gone == set()
