"""FittingTable: every number is there at any width, and a table where there is room for one."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from flexinfer.cli.bench.step_table import profile_table
from flexinfer.cli.fitting_table import FittingTable
from flexinfer.cli.simulate.command import COLUMNS, _print
from flexinfer.engine.profile import PARTS

WIDTHS = [20, 40, 80, 120]


def shown(renderable: Any, width: int) -> str:
    screen = io.StringIO()
    Console(file=screen, width=width).print(renderable)
    return screen.getvalue()


@pytest.mark.parametrize("width", WIDTHS)
def test_no_cell_is_cut(width: int) -> None:
    table = Table("name", "calls\nrecorded", "exposed", title="Driver time, ms")
    table.add_row("map", "123456", "1234567.89")
    table.add_row("unmap", "", "0.25")
    text = shown(FittingTable(table), width)
    assert all(number in text for number in ("123456", "1234567.89", "0.25"))
    assert max(map(len, text.splitlines())) <= width
    assert ("map: calls recorded 123456; exposed 1234567.89" in " ".join(text.split())) == (
        width < 40
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_the_parts_of_a_step_keep_their_numbers(width: int) -> None:
    parts = {"attention": {"ms": 1234.567, "share": 0.987, "calls": 65432}}
    kind = {"tokens_per_step": 8192, "parts": parts, "step_ms": 1250.125}
    text = shown(FittingTable(profile_table(kind, kind)), width)
    assert all(text.count(number) == 2 for number in ("1234.567", "98.7%", "65432", "1250.125"))


@pytest.mark.parametrize("limits", [{}, {"of_limit": 0.75}])
def test_the_parts_of_a_step_are_a_table_on_a_usual_terminal(limits: dict[str, float]) -> None:
    part = {"ms": 1234.567, "share": 0.987, "calls": 65432} | limits
    kind = {"tokens_per_step": 8192, "parts": dict.fromkeys(PARTS, part), "step_ms": 12345.678}
    lines = shown(FittingTable(profile_table(kind | limits, kind | limits)), 80).splitlines()
    rows = {line[:16].strip(): line for line in lines}
    assert all(rows[part].count("1234.567") == 2 for part in PARTS)
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("columns", [40, 80])
def test_a_comparison_of_routers_keeps_its_numbers(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    numbers = {name: 54321 if text == "{:.0f}" else 0.875 for name, text in COLUMNS.values()}
    numbers |= {"num_failed": 17, "kv_elsewhere_bytes": 512 << 20}
    _print({"num_requests": 60, "replicas": 8, "routers": {"prefix-affinity": numbers}})
    text = capsys.readouterr().out
    assert text.count("54321") == 4
    assert all(number in " ".join(text.split()) for number in ("0.875", "0.88", "88%", "512.0 MiB"))
    assert ("─" in text) == (columns == 80)
