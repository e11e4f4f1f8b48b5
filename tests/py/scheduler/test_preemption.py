"""Recompute or swap: by cost, with the reason told and counted."""

from __future__ import annotations

import pytest

from flexinfer.scheduler.preemption import Decision, PreemptionPolicy

MIB = 1 << 20


@pytest.mark.parametrize(
    ("num_lost_tokens", "num_bytes", "mode"),
    [
        (1000, 100 * MIB, "swap"),  # 1 s against 0.2 s
        (100, 100 * MIB, "recompute"),  # 0.1 s against 0.2 s
        (0, 100 * MIB, "recompute"),  # all of it is recorded
    ],
)
def test_auto_takes_the_cheaper_by_measured_speeds(
    num_lost_tokens: int, num_bytes: int, mode: str
) -> None:
    policy = PreemptionPolicy("auto")
    policy.observe_prefill(500, 0.5)
    policy.observe_swap(1000 * MIB, 1.0)
    assert policy.choose(num_lost_tokens, num_bytes, num_bytes) == Decision(mode, "cheaper")  # type: ignore[arg-type]


def test_speeds_follow_what_is_measured() -> None:
    policy = PreemptionPolicy("auto", smoothing=0.5)
    policy.observe_prefill(1000, 1.0)
    policy.observe_prefill(3000, 1.0)
    policy.observe_swap(10, 0.0)  # too short to tell
    assert policy.prefill_tokens_per_s == 2000
    assert policy.swap_bytes_per_s is None


@pytest.mark.parametrize(
    ("mode", "has_swap_space", "decision"),
    [
        ("recompute", True, Decision("recompute", "configured")),
        ("swap", True, Decision("swap", "configured")),
        ("swap", False, Decision("recompute", "no swap space")),
        ("auto", False, Decision("recompute", "no swap space")),
    ],
)
def test_the_mode_decides_where_there_is_no_choice(
    mode: str, has_swap_space: bool, decision: Decision
) -> None:
    assert PreemptionPolicy(mode, has_swap_space).choose(10_000, 1, 1) == decision


def test_preemptions_are_counted_by_mode_and_reason() -> None:
    policy = PreemptionPolicy("auto")
    for cause in ("growth", "growth", "budget lowered"):
        policy.count(Decision("swap", "cheaper"), cause)
    assert policy.counts_by_mode() == {
        "recompute": {},
        "swap": {"growth: cheaper": 2, "budget lowered: cheaper": 1},
    }
