"""The soak in its short form, 150 s: see benchmarks/soak. And the rules by which it judges."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
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


@pytest.mark.parametrize(("mib_per_hour", "is_flat"), [(0.5, True), (3.0, False)])
def test_an_hour_tells_a_slow_leak_by_its_slope(
    soak: Any, mib_per_hour: float, is_flat: bool
) -> None:
    """Beside noise that is larger than the leak, and a first quarter that grows fast; asleep there
    is less of it."""
    report, draw = soak.SoakReport(seconds=3600.0), Random(0)
    for at_s in range(0, 3600, 2):
        size = 300 + min(at_s, 900) / 10 + mib_per_hour * at_s / 3600
        report.samples.append((float(at_s), (size + draw.gauss(0, 1)) * MIB, 0))
        report.rests.append((float(at_s), (size + draw.gauss(0, 0.1)) * MIB))
    report.judge()
    assert abs(report.slope.mib_per_hour - mib_per_hour) < 3 * report.slope.error < 1
    assert (report.problems == []) is is_flat
    assert str(report.slope) in report.table()


def test_a_leak_that_drowns_in_activations_is_seen_while_the_engine_sleeps(soak: Any) -> None:
    report, draw = soak.SoakReport(seconds=3600.0), Random(0)
    for at_s in range(0, 3600, 2):
        report.samples.append((float(at_s), (300 + at_s / 1800 + draw.gauss(0, 60)) * MIB, 0))
        report.rests.append((float(at_s), (280 + at_s / 1800 + draw.gauss(0, 0.1)) * MIB))
    report.judge()
    assert [problem[:28] for problem in report.problems] == ["the resident set at rest may"]


def test_a_failure_beside_the_callers_loses_no_numbers(soak: Any) -> None:
    async def work() -> None:
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def failing() -> None:
        raise ConnectionError("gone")

    async def endless() -> None:
        await asyncio.Event().wait()

    failures = asyncio.run(soak._with_background([work()], [failing(), endless()]))
    assert [str(failure) for failure in failures] == ["gone"]


def test_what_is_left_behind_is_a_problem(soak: Any) -> None:
    report = soak.SoakReport(before={"resident_bytes": 0}, after={"resident_bytes": 65536})
    report.judge()
    assert "left behind" in report.problems[0]


def test_a_connection_that_closed_late_before_is_none(soak: Any) -> None:
    report = soak.SoakReport(before={"open_files": 9}, after={"open_files": 8})
    report.judge()
    assert report.problems == []
