"""How benchmarks/isolation compares two distributions of times; nothing is served."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks" / "isolation"
NAMES = ("isolation", "attacks", "provenance")


@pytest.fixture
def isolation(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in NAMES:
        sys.modules.pop(name, None)
    import isolation

    yield isolation
    for name in NAMES:
        sys.modules.pop(name, None)


def test_the_interval_of_a_change_holds_the_change_that_there_is(isolation: Any) -> None:
    """Times that are half as long again, at every percentile."""
    draw = Random(0)
    control = [draw.lognormvariate(0, 0.5) for _ in range(1600)]
    attacked = [1.5 * draw.lognormvariate(0, 0.5) for _ in range(1600)]
    low, high = isolation.interval(control, attacked)
    assert 0 < low < 50 < high < 120
    assert low <= isolation.change_percent(control, attacked) <= high


def test_attack_and_control_take_turns(isolation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []

    def under(name: str, port: int, seconds: float, *, sink: bool) -> tuple[list[float], Any]:
        order.append(sink)
        return [0.01, 0.02 if sink else 0.04] * 20, {"200": 1}

    monkeypatch.setattr(isolation, "under", under)
    found = isolation.measure("bodies", 0, 1.0, 2)
    assert order == [True, False, False, True]
    assert found["p99_change_percent"] == pytest.approx(100)
    assert found["holds"] is False
    assert isolation.measure("ordinary", 0, 1.0, 1)["holds"] is None


def test_ordinary_requests_are_those_of_the_attack_without_its_metadata(isolation: Any) -> None:
    import attacks

    (plain,) = attacks.ordinary("key")
    *_, full = attacks.metadata("key")
    bodies = [json.loads(one.partition(b"\r\n\r\n")[2]) for one in (plain, full)]
    assert bodies[0] == {name: bodies[1][name] for name in ("input", "max_output_tokens")}
