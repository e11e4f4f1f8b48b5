"""The demo's checks. Each looks at the records alone and lists what is wrong, if anything."""

from __future__ import annotations

from dataclasses import dataclass

from flexinfer.cli.demo.records import Run, Turn
from flexinfer.engine.history import common_prefix

MAX_UNRECORDED = 1
"""The last token of an answer is sampled but never fed: the next turn computes its KV."""


@dataclass(frozen=True)
class Check:
    """A claim, and where it does not hold."""

    claim: str
    failures: list[str]

    @property
    def passed(self) -> bool:
        return not self.failures


def all_checks(cached: Run, uncached: Run) -> list[Check]:
    """Every check that these runs admit."""
    checks = [check_identical(cached, uncached), check_shared_prompt(cached), check_reuse(cached)]
    if any(turn.expect for turn in cached.turns):
        checks.append(check_answers(cached))
    return checks


def check_identical(cached: Run, uncached: Run) -> Check:
    """Sharing memory changes no token."""
    others = {(turn.conversation, turn.turn): turn for turn in uncached.turns}
    failures = []
    for turn in cached.turns:
        other = others.get((turn.conversation, turn.turn))
        if other is None:
            failures.append(f"{_place(turn)}: missing in the run without prefix cache")
        elif (turn.prompt_token_ids, turn.token_ids) != (other.prompt_token_ids, other.token_ids):
            same = common_prefix(turn.token_ids, other.token_ids)
            failures.append(f"{_place(turn)}: answers differ from token {same + 1} on")
    return Check("both runs gave identical tokens", failures)


def check_shared_prompt(cached: Run, min_shared_tokens: int = 16) -> Check:
    """In turn 1 the common beginning of the prompts is computed once."""
    first, *others = cached.of_turn(1)
    failures = []
    for turn in others:
        shared = common_prefix(first.prompt_token_ids, turn.prompt_token_ids)
        shared = min(shared, turn.num_prompt_tokens - 1)
        if shared >= min_shared_tokens and turn.num_reused_tokens < shared:
            failures.append(
                f"{_place(turn)}: shares {shared} tokens with conversation {first.conversation}, "
                f"but reused {turn.num_reused_tokens}"
            )
    return Check("the shared system prompt was computed once", failures)


def check_reuse(cached: Run) -> Check:
    """Later turns compute their new tokens and, of what came before, at most one."""
    failures = []
    for turn in cached.turns:
        if turn.turn == 1:
            continue
        allowed = turn.num_new_tokens + MAX_UNRECORDED
        not_reused = turn.num_prompt_tokens - turn.num_reused_tokens
        if max(turn.num_computed_tokens, not_reused) > allowed:
            preempted = f" (preempted {turn.num_preemptions} times)" if turn.num_preemptions else ""
            failures.append(
                f"{_place(turn)}: computed {max(turn.num_computed_tokens, not_reused)} prompt "
                f"tokens, but only {turn.num_new_tokens} are new{preempted}"
            )
    return Check("later turns computed only their new tokens", failures)


def check_answers(cached: Run) -> Check:
    """Answers that depend on earlier turns are right."""
    failures = [
        f"{_place(turn)}: {turn.expect!r} is not in {turn.text!r}"
        for turn in cached.turns
        if turn.expect is not None and turn.expect not in turn.text
    ]
    return Check("every answer holds what was told in earlier turns", failures)


def _place(turn: Turn) -> str:
    return f"conversation {turn.conversation}, turn {turn.turn}"
