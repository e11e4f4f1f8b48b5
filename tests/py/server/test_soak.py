"""The soak in its short form, 150 s: see benchmarks/soak. And the rules by which it judges."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SOAK = Path(__file__).resolve().parents[3] / "benchmarks" / "soak"
MIB = 1 << 20


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(sys, "path", [str(SOAK), *sys.path])
    import soak

    return soak


@pytest.mark.slow
def test_nothing_is_lost_wrong_or_left(soak: Any) -> None:
    report = soak.run(num_requests=5000, concurrency=12, seconds=150, seed=1)
    print(report.table())
    assert report.problems == []
    for kind in ("whole", "streamed", "dialogues", "left early", "malformed", "/admin/sleep 200"):
        assert report.counts[kind] > 0
    assert len(report.quarters_bytes) == 4
    assert report.after["resident_bytes"] == report.after["pool_bytes"] == 0


@pytest.mark.parametrize(
    ("late_mib", "is_flat"), [(300, True), (310, True), (320, False), (900, False)]
)
def test_a_resident_set_that_grows_is_a_problem(soak: Any, late_mib: int, is_flat: bool) -> None:
    """The second quarter has 300 MiB; the first one does not count, nor does a single peak."""
    report = soak.SoakReport()
    sizes = [100] * 10 + [300] * 10 + [305] * 10 + [late_mib] * 9 + [2000]
    report.samples = [(float(i), size * MIB, 0) for i, size in enumerate(sizes)]
    report.judge()
    assert (report.problems == []) is is_flat


def test_what_is_left_behind_is_a_problem(soak: Any) -> None:
    report = soak.SoakReport(before={"resident_bytes": 0}, after={"resident_bytes": 65536})
    report.judge()
    assert "left behind" in report.problems[0]


def test_a_connection_that_closed_late_before_is_none(soak: Any) -> None:
    report = soak.SoakReport(before={"open_files": 9}, after={"open_files": 8})
    report.judge()
    assert report.problems == []
