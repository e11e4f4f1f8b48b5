"""Isolation: whose part of a step fails, found by computing the step again in parts. No torch.

    a b c d e f g h     fails
    a b c d . . . .     computed: their tokens are these
    . . . . e f . .     fails (after e f g h did)
    . . . . e . . .     fails alone: e ends with this error
    . . . . . f . .     computed
    . . . . . . g h     computed

Each row is computed at most log2(n) + 1 times more, and once more without its proposal where that
fails: a request gets none any more then. KV that a failed attempt has written is written again, to
the same places; requests have not moved on meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from flexinfer.errors import EngineDeadError
from flexinfer.runner.plan import SampledToken, SequenceFailure, StepResult
from flexinfer.scheduler.batch import ScheduledRequest
from flexinfer.scheduler.request import Request

logger = logging.getLogger(__name__)

Failure = tuple[Request, str]
Execute = Callable[[Sequence[ScheduledRequest]], StepResult]


def execute_in_parts(
    execute: Execute, items: Sequence[ScheduledRequest], is_shortage: Callable[[Exception], bool]
) -> tuple[StepResult, list[Failure]]:
    """What `execute` gives for the items that it can compute, and why it cannot the others.

    execute: failed for all of them together. Raises its last error if it can compute none, and a
    shortage of memory, which is nobody's fault, at once.
    """
    tokens: list[SampledToken] = []
    failures: list[SequenceFailure] = []
    guilty: list[Failure] = []
    parts = _smaller(items)
    is_any_computed = False
    while parts:
        part = parts.pop()
        try:
            result = execute(part)
        except EngineDeadError:
            raise
        except Exception as error:
            if is_shortage(error):
                raise
            if len(part) > 1 or part[0].draft:
                parts += _smaller(part)
                continue
            if not parts and not is_any_computed:
                raise
            request = part[0].request
            logger.warning("request %r makes its step fail", request.request_id, exc_info=True)
            guilty.append((request, f"{type(error).__name__}: {error}"))
        else:
            is_any_computed = True
            tokens += result.tokens
            failures += result.failures
    return StepResult(tokens, failures), guilty


def _smaller(items: Sequence[ScheduledRequest]) -> list[Sequence[ScheduledRequest]]:
    """The second half, then the first, which is thus the next on a stack; of one item, itself
    without its proposal."""
    if len(items) == 1:
        items[0].request.may_speculate = False
        return [[items[0].without_draft()]]
    middle = len(items) // 2
    return [items[middle:], items[:middle]]
