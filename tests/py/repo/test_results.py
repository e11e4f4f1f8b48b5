"""Every committed result says how it came about."""

from __future__ import annotations

import ast
import errno
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT / "benchmarks" / "common"))
from provenance import REQUIRED, environment, write_report

FILES = sorted(RESULTS.glob("*/*.json"))


def lacking(path: Path) -> list[str]:
    found = json.loads(path.read_text(encoding="utf-8")).get("environment", {})
    return [name for name in REQUIRED if found.get(name) in (None, "", "unknown")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(RESULTS)))
def test_a_result_says_how_it_came_about(path: Path) -> None:
    assert lacking(path) == []


def test_a_report_has_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.json"
    write_report(path, "soak", {"rows": [1]}, load_before=[0.5])
    report = json.loads(path.read_text())
    assert lacking(path) == []
    assert (report["benchmark"], report["rows"]) == ("soak", [1])
    assert report["environment"]["load_before"] == [0.5]
    assert environment("cpu")["cpu"] != ""


def test_a_report_that_cannot_be_written_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    path.write_text("before")

    def fill_the_disk(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", fill_the_disk)
    with pytest.raises(SystemExit, match=r"report\.json is not written: No space left on device"):
        write_report(path, "soak", {"rows": [1]})
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [
        ("report.json", "before")
    ]
    assert json.loads(capsys.readouterr().out)["rows"] == [1]


def test_every_benchmark_writes_its_results_so() -> None:
    """By write_report, or by the GPU benchmarks' `finish`, which uses the same environment."""
    for bench in sorted((ROOT / "benchmarks").glob("*/[bs]*.py")):
        source = bench.read_text(encoding="utf-8")
        if '"--json"' in source:
            names = {n.id for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Name)}
            assert names & {"write_report", "finish"}, bench
            assert ".write_text(json" not in source, bench
