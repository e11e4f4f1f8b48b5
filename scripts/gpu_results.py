"""pytest plugin: each test's result as a line of JSON, at once: an end by force loses none.

    python -m pytest -p gpu_results --gpu-results FILE

A line has `test` and `outcome`: `started`, `passed`, `failed` or `skipped` (with `reason`), and
`seconds`. A test whose last line says `started` was running when all was over.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-results", type=Path, help="append each test's result to this file")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--gpu-results")
    # Beside xdist the workers' results arrive here too, in the process that has no worker's number.
    if file is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Results(file), "gpu-results-writer")


class Results:
    """Writes lines; each is flushed at once."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("a", encoding="utf-8")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(test=nodeid, outcome="started")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._write(
                test=report.nodeid,
                outcome=report.outcome,
                seconds=round(report.duration, 2),
                reason=reason_of(report),
            )

    def _write(self, **fields: Any) -> None:
        self._file.write(json.dumps(fields) + "\n")
        self._file.flush()


def reason_of(report: pytest.TestReport) -> str:
    """Why it was skipped, or the last line of the failure."""
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    lines = report.longreprtext.strip().splitlines()
    errors = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (errors or lines or [""])[0][:300]
