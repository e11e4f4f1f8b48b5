"""The demo's checks, each on records in which exactly that is wrong."""

from __future__ import annotations

from typing import Any

from flexinfer.cli.demo.checks import (
    all_checks,
    check_answers,
    check_identical,
    check_reuse,
    check_shared_prompt,
)
from flexinfer.cli.demo.records import Run, Turn

SYSTEM = list(range(100, 130))


def turn(conversation: int, number: int, **changes: Any) -> Turn:
    """A faultless turn: 30 shared tokens, then 5 prompt tokens and 3 answer tokens a turn."""
    num_before = 30 + 8 * (number - 1)
    prompt = [*SYSTEM, *range(1000 * conversation, 1000 * conversation + num_before - 25)]
    reused = num_before - 1 if number > 1 else (0 if conversation == 1 else 30)
    values: dict[str, Any] = {
        "conversation": conversation,
        "turn": number,
        "user": "?",
        "expect": "Ann",
        "prompt_token_ids": prompt,
        "token_ids": [1, 2, 3],
        "text": "You are Ann.",
        "finish_reason": "stop",
        "num_new_tokens": 5 if number > 1 else len(prompt),
        "num_reused_tokens": reused,
        "num_computed_tokens": len(prompt) - reused,
        "chunks_aliased": 1,
        "chunks_copied": 0,
        "num_preemptions": 0,
        "time_to_first_token_s": 0.1,
    }
    return Turn(**{**values, **changes})


def run(*changed: Turn) -> Run:
    """Two conversations of two turns; `changed` stand in for those of the same place."""
    turns = {(c, t): turn(c, t) for t in (1, 2) for c in (1, 2)}
    turns |= {(entry.conversation, entry.turn): entry for entry in changed}
    return Run(True, 4096, 1024, 4, turns=list(turns.values()))


def test_faultless_runs_pass_every_check() -> None:
    checks = all_checks(run(), run())
    assert [check.failures for check in checks] == [[], [], [], []]


def test_one_different_token_fails() -> None:
    check = check_identical(run(), run(turn(2, 2, token_ids=[1, 9, 3])))
    assert check.failures == ["conversation 2, turn 2: answers differ from token 2 on"]


def test_a_different_prompt_fails() -> None:
    assert not check_identical(run(), run(turn(2, 2, prompt_token_ids=[7]))).passed


def test_a_missing_turn_fails() -> None:
    shorter = run()
    shorter.turns.pop()
    assert not check_identical(run(), shorter).passed


def test_the_last_token_of_an_answer_may_be_computed_again() -> None:
    assert check_reuse(run()).passed
    fewer = turn(1, 2, num_reused_tokens=turn(1, 2).num_reused_tokens - 1)
    assert "computed 7 prompt tokens, but only 5 are new" in check_reuse(run(fewer)).failures[0]


def test_what_was_really_computed_counts_and_not_what_was_said_to_be_reused() -> None:
    check = check_reuse(run(turn(1, 2, num_computed_tokens=40, num_preemptions=1)))
    assert "computed 40" in check.failures[0]
    assert "preempted 1 times" in check.failures[0]


def test_a_system_prompt_computed_twice_fails() -> None:
    check = check_shared_prompt(run(turn(2, 1, num_reused_tokens=0)))
    assert check.failures == [
        "conversation 2, turn 1: shares 30 tokens with conversation 1, but reused 0"
    ]


def test_a_wrong_answer_fails() -> None:
    check = check_answers(run(turn(2, 2, text="You are Bob.")))
    assert check.failures == ["conversation 2, turn 2: 'Ann' is not in 'You are Bob.'"]


def test_without_expectations_answers_are_not_judged() -> None:
    free = run(*(turn(c, t, expect=None) for c in (1, 2) for t in (1, 2)))
    assert len(all_checks(free, free)) == 3
