"""Counts what docs/testing.md quotes: lines of code and of tests, tests, parametrised cases.

python scripts/test_numbers.py            prints the table
python scripts/test_numbers.py --write    puts it into docs/testing.md
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "testing.md"
TABLE = re.compile(r"(?<=<!-- numbers -->\n).*(?=<!-- end of numbers -->)", re.DOTALL)


def files(folder: str, *endings: str) -> Iterator[Path]:
    return (path for path in (ROOT / folder).rglob("*") if path.suffix in endings)


def num_lines(folder: str, *endings: str) -> int:
    return sum(len(path.read_text().splitlines()) for path in files(folder, *endings))


def num_python_tests() -> int:
    return sum(
        node.name.startswith("test_")
        for path in files("tests/py", ".py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def num_cpp_tests() -> int:
    macro = re.compile(r"^(?:TYPED_)?TEST(?:_F|_P)?\(", re.MULTILINE)
    return sum(len(macro.findall(path.read_text())) for path in files("tests/cpp", ".cpp"))


def num_cases() -> int:
    """Python tests as pytest runs them, each set of parameters counted."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "tests/py"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sum(int(line.rpartition(": ")[2]) for line in output.splitlines() if ".py: " in line)


def table() -> str:
    code = num_lines("python", ".py") + num_lines("cpp", ".h", ".cpp")
    tests = num_lines("tests", ".py", ".h", ".cpp")
    rows = {
        "lines of Python in the package": num_lines("python", ".py"),
        "lines of C++ in the core and the bindings": num_lines("cpp/vtensor", ".h", ".cpp")
        + num_lines("cpp/bindings", ".h", ".cpp"),
        "lines of C++ in the CPU kernels": num_lines("cpp/kernels", ".h", ".cpp"),
        "lines of tests": tests,
        "C++ tests, before parameters": num_cpp_tests(),
        "Python tests, before parameters": num_python_tests(),
        "Python cases that pytest collects": num_cases(),
    }
    lines = [f"| counted {datetime.now(UTC):%Y-%m-%d} | |", "|---|---|"]
    lines += [f"| {name} | {number:,} |" for name, number in rows.items()]
    return "\n".join([*lines, f"| lines of tests per line of code | {tests / code:.2f} |", ""])


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text()))
    else:
        print(table(), end="")
