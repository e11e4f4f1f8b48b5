"""StepCost: how long a step takes, as a sum of what it computes and reads; fitted to real steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

from flexinfer.runtime.numbers import real
from flexinfer.scheduler.batch import ScheduledRequest


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step does, in numbers that its time is a sum of."""

    num_steps: int = 1
    num_prefill_tokens: int = 0
    num_decodes: int = 0
    num_decode_keys: int = 0
    """Tokens of KV that decodes read."""
    num_prefill_pairs: int = 0
    """Of a prompt's tokens and the tokens that each sees."""

    @classmethod
    def of(cls, items: Iterable[ScheduledRequest]) -> StepWork:
        prefill_tokens = decodes = decode_keys = pairs = 0
        for item in items:
            if item.num_tokens == 1:
                decodes += 1
                decode_keys += item.end
            else:
                prefill_tokens += item.num_tokens
                pairs += item.num_tokens * (item.start + item.end + 1) // 2
        return cls(1, prefill_tokens, decodes, decode_keys, pairs)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Microseconds of each number of `StepWork`."""

    step_us: float
    prefill_token_us: float
    decode_us: float
    decode_key_us: float
    prefill_pair_us: float

    def __post_init__(self) -> None:
        for name in self.__slots__:
            real(name, getattr(self, name))
        if min(astuple(self)) < 0 or not any(astuple(self)):
            raise ValueError(f"costs must not be negative, and not all 0, got {self}")

    def seconds(self, work: StepWork) -> float:
        return float(sum(a * b for a, b in zip(astuple(self), astuple(work), strict=True))) / 1e6


SHIPPED_COST = StepCost(4000.0, 60.0, 200.0, 0.2, 0.02)
"""About what the shipped model takes in float32 on two cores. Fit your own."""


def fit_cost(steps: Sequence[tuple[StepWork, float]]) -> StepCost:
    """The costs that explain real steps best: least squares of the relative errors, none negative.
    steps: work and seconds. Raises ValueError for fewer steps than costs."""
    import numpy as np

    names = StepCost.__slots__
    if len(steps) < len(names):
        raise ValueError(f"{len(steps)} steps cannot tell {len(names)} costs; measure more")
    seconds = np.array([seconds for _, seconds in steps])
    table = np.array([astuple(work) for work, _ in steps], dtype=float) / 1e6 / seconds[:, None]
    kept = [column for column in range(len(names)) if table[:, column].any()]
    while True:  # a cost below zero is none; the others are fitted again without it
        found, *_ = np.linalg.lstsq(table[:, kept], np.ones(len(steps)), rcond=None)
        if (found >= 0).all():
            break
        del kept[int(found.argmin())]
    costs = dict.fromkeys(names, 0.0) | {
        names[column]: float(cost) for column, cost in zip(kept, found, strict=True)
    }
    return StepCost(**costs)
