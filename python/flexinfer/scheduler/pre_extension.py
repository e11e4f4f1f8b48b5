"""Pre-extension: how far ahead of the kernels memory is mapped, and the asking for it. No torch.

The worker maps while the model computes (FlexInfer, Xu et al., 2024, section 6, Algorithm 1;
vAttention, Prabhu et al., 2024, section 6.1.1). A prefill asks for its next chunk of tokens and,
where the prompt ends, for one row of chunks beyond it. A decode asks for `ExtensionDepth.tokens`.
What windows have left behind goes the other way, by the same worker.
Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flexinfer.scheduler.batch import ScheduledRequest
    from flexinfer.vtensor import VTensorManager

BURST_DECAY = 0.98
"""A burst of rows is remembered for about 50 steps."""


class ExtensionDepth:
    """Tokens beyond the present end that a decoding request should have mapped.

    Learned by exponential averages. The worker has `steps x step_us` for the largest burst of rows
    that fall due in one step, and needs `burst_rows x row_us` for it:

        row_us = mean + 4 x mean deviation of a row's mapping time (as TCP does: Jacobson, 1988)
        steps  = ceil(safety x burst_rows x row_us / step_us), at least 1
        tokens = ceil(steps x tokens_per_step), at most rows_ahead x tokens_per_row

    so a slow step or fast mapping keeps the memory that lies idle ahead of need near one token.
    """

    def __init__(
        self,
        tokens_per_row: float,
        *,
        rows_ahead: float = 1.0,
        safety: float = 2.0,
        smoothing: float = 0.2,
    ) -> None:
        self.max_tokens = max(1, int(tokens_per_row * rows_ahead))
        self.safety = safety
        self.smoothing = smoothing
        self.map_us_per_row: float | None = None
        self.map_us_deviation = 0.0
        self.step_us: float | None = None
        self.tokens_per_step = 1.0
        self.burst_rows = 0.0

    def observe_step(self, step_us: float, map_us: float, num_rows: int) -> None:
        """A step took `step_us`, in which the worker mapped `num_rows` rows in `map_us`."""
        self.step_us = self._average(self.step_us, step_us)
        if num_rows > 0:
            self._observe_row(map_us / num_rows)

    def observe_growth(self, num_rows: int, tokens_per_step: float = 1.0) -> None:
        """`num_rows` rows fell due in one step; decodes grew by `tokens_per_step` tokens each."""
        self.burst_rows = max(float(num_rows), BURST_DECAY * self.burst_rows)
        self.tokens_per_step = self._average(self.tokens_per_step, tokens_per_step)

    @property
    def steps(self) -> int:
        """Steps of lead that the worker needs."""
        if self.map_us_per_row is None or not self.step_us:
            return 2  # nothing is known yet
        row_us = self.map_us_per_row + 4 * self.map_us_deviation
        work_us = self.safety * self.burst_rows * row_us
        return max(1, ceil(work_us / self.step_us))

    @property
    def tokens(self) -> int:
        return min(self.max_tokens, max(1, ceil(self.steps * self.tokens_per_step)))

    def _observe_row(self, row_us: float) -> None:
        mean_us = row_us if self.map_us_per_row is None else self.map_us_per_row
        self.map_us_deviation = self._average(self.map_us_deviation, abs(row_us - mean_us))
        self.map_us_per_row = self._average(self.map_us_per_row, row_us)

    def _average(self, old: float | None, new: float) -> float:
        return new if old is None else old + self.smoothing * (new - old)


class PreExtender:
    """Hands the need of the next steps to the manager's worker."""

    def __init__(self, manager: VTensorManager, max_step_tokens: int) -> None:
        self._manager = manager
        self._max_step_tokens = max_step_tokens
        self._token_bytes = manager.spec.plane_token_bytes
        self._has_windows = bool(manager.spec.windows)
        self._chunk_bytes = manager.chunk_bytes
        self._tokens_per_row = max(1, self._chunk_bytes // self._token_bytes)
        self.depth = ExtensionDepth(self._chunk_bytes / self._token_bytes)
        self._is_busy = False

    def ask(self, items: Sequence[ScheduledRequest]) -> None:
        """Ask for what the batch's requests need after this step. Never fails, never waits.

        A request that was asked for before is asked for again only when its row falls due.
        """
        self._set_busy(True)
        depth = self.depth.tokens
        vtensors = []
        targets = []
        num_due = 0
        for item in items:
            request = item.request
            target = min(self._target(item, depth), request.max_num_tokens - 1)
            num_rows = self._rows(target)
            is_due = self._rows(item.end + 1) > self._rows(item.end)
            num_due += is_due
            if num_rows > request.num_asked_rows or is_due:
                request.num_asked_rows = num_rows
                vtensors.append(item.vtensor)
                targets.append(target)
        self.depth.observe_growth(num_due)
        self._manager.pre_extend(vtensors, targets)  # an empty one wakes the worker for upkeep

    def rest(self) -> None:
        """No step follows for now: the worker fills up what is kept ready."""
        self._set_busy(False)

    def forget(self, items: Sequence[ScheduledRequest]) -> None:
        """Have what windows have left given back: the items are computed, and no query before their
        ends follows. Never fails, never waits."""
        if not self._has_windows:
            return
        ids = [item.vtensor.id for item in items]  # released ones too: nothing happens to these
        self._manager.forget_ids(ids, [item.end for item in items])

    def _set_busy(self, busy: bool) -> None:
        if busy != self._is_busy:
            self._is_busy = busy
            self._manager.set_busy(busy)

    def _target(self, item: ScheduledRequest, depth: int) -> int:
        request = item.request
        if not request.is_prefilling:
            return item.end + depth
        target = min(item.end + self._max_step_tokens, request.num_tokens)
        return target if target < request.num_tokens else target + self._tokens_per_row

    def _rows(self, num_tokens: int) -> int:
        return -(-num_tokens * self._token_bytes // self._chunk_bytes)
