"""The soak in its short form: see benchmarks/soak."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).resolve().parents[3] / "benchmarks" / "soak"


@pytest.mark.slow
def test_nothing_is_lost_wrong_or_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(SOAK), *sys.path])
    from soak import run

    report = run(num_requests=5000, concurrency=12, seconds=150, seed=1)
    assert not report.problems
    for kind in ("whole", "streamed", "left early", "malformed", "/admin/sleep"):
        assert report.counts[kind] > 0
