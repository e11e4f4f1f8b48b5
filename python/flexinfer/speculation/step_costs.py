"""StepCosts: how much longer a step takes for each further row that it computes. No torch.

    us |            .--- beyond what was measured: as steep, until such a step is measured
       |       .---'
       |  .---'          between two measurements: a line
       | '
       +--+----+------- rows beyond one per request

Learned for each number of requests, from steps of decodes alone; where no step with further rows
was measured, they cost what they do with about as many requests. Of the last steps of a kind the
median counts, once there are MIN_STEPS: a step that something else delayed must not end proposals,
after which none would be measured. What is known is believed for MAX_AGE steps: requests grow
longer. Not thread-safe.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf
from statistics import median_low

import numpy as np

MAX_AGE = 256
"""Steps; MIN_STEPS of so many are spent on measuring what is not known, or no more."""
MIN_STEPS = 2
"""Of two the quicker one counts: what delays a step makes none quicker."""
NUM_STEPS = 5
BASE_AGE = 8
"""Steps after which those without further rows are measured again where little is gained by them:
the first two follow prompts, and took a sixth longer than others in a model of 8 bits."""


@dataclass(slots=True)
class _Measured:
    step: int = 0
    """The last one."""
    last_us: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_STEPS))

    @property
    def us(self) -> float:
        return median_low(self.last_us)


class StepCosts:
    """Of one engine."""

    def __init__(self) -> None:
        self._known: dict[int, dict[int, _Measured]] = {}
        """By requests and further rows, both rounded."""
        self._row_us: dict[int, tuple[int, float]] = {}
        """By requests: at which step it was last seen what a further row costs, and what."""
        self._num_steps = 0

    def observe(self, num_requests: int, num_further: int, step_us: float) -> None:
        """A step of decodes had so many requests, and rows beyond one for each."""
        self._num_steps += 1
        known = self._known.setdefault(rounded(num_requests), {})
        key = rounded(num_further)
        if key not in known or self._num_steps - known[key].step > MAX_AGE:
            known[key] = _Measured()
        known[key].step = self._num_steps
        known[key].last_us.append(step_us)

    def is_base_old(self, num_requests: int) -> bool:
        """Whether no step of the last BASE_AGE with so many requests was without further rows."""
        known = self._known.get(rounded(num_requests), {})
        return 0 not in known or self._num_steps - known[0].step >= BASE_AGE

    def estimate(self, num_requests: int, num_further: int) -> list[float] | None:
        """Microseconds of steps with 0, 1, ... `num_further` further rows; None: measure steps
        without any first."""
        known = self._known.get(rounded(num_requests), {})
        oldest = self._num_steps - MAX_AGE
        fresh = {rows: one for rows, one in sorted(known.items()) if one.step >= oldest}
        points = {rows: one.us for rows, one in fresh.items() if len(one.last_us) >= MIN_STEPS}
        if 0 not in points:
            return None
        rows, costs = list(points), list(points.values())
        slopes = [(one.us - costs[0]) / n for n, one in fresh.items() if n]
        if rows[-1] == 0 and len(slopes) < MIN_STEPS:
            row_us = self._row_us_about(num_requests, costs[0])
        else:
            steepness = (costs[-1] - costs[0]) / rows[-1] if rows[-1] else min(slopes)
            row_us = max(0.0, steepness)
            self._row_us[rounded(num_requests)] = self._num_steps, row_us
        wanted = np.arange(num_further + 1)
        within = np.interp(wanted, rows, np.maximum.accumulate(costs))
        beyond = np.maximum(wanted - rows[-1], 0) * row_us
        found: list[float] = (within + beyond).tolist()
        return found

    def _row_us_about(self, num_requests: int, base_us: float) -> float:
        """Of the nearest number of requests, up to twice or half as many; else a guess."""
        near = {
            max(number, num_requests) / min(number, num_requests): row_us
            for number, (step, row_us) in self._row_us.items()
            if self._num_steps - step <= MAX_AGE
        }
        nearest = min(near, default=inf)
        return near[nearest] if nearest <= 2 else base_us * guessed_share(num_requests)


def rounded(number: int) -> int:
    """Down to three significant bits: 0 to 8, 10, 12, 14, 16, 20, ..."""
    shift = max(0, number.bit_length() - 3)
    return number >> shift << shift


def guessed_share(num_requests: int) -> float:
    """Of a step without further rows, what one of them is guessed to cost: half of what a request
    costs there, and less where a step reads weights for few rows."""
    return min(0.05, 0.5 / num_requests)
