"""StreamPace: after which steps streams get an output. No torch.

An event of a stream takes CPU time which the engine lacks where the cores compute the model. With
few streams each token is an event. With many at once tokens are shown together, those of all
streams after the same step, so that there are at most `MAX_EVENTS_PER_S` events per second, unless
a token would wait for longer than `MAX_DELAY_S`:

    step     1   2   3   4   5   6   7   8    17 ms each, 32 streams
    shown    *       *       *       *        the token of step 2 waits for 17 ms

The first token of a stream and its end are always shown at once (`OutputBuilder.is_due`).
"""

from __future__ import annotations

MAX_EVENTS_PER_S = 1000.0
"""Of all streams; one takes some 50 us of one core, in the server and the client together."""
MAX_DELAY_S = 0.05
"""Some 20 changes per second look like steady writing."""


class StreamPace:
    """For one engine: what all its streams go by."""

    def __init__(self, interval: int | None = 1) -> None:
        """`interval`: tokens in one output, always; None: by the load, as above."""
        self._interval = interval
        self._is_open = True
        self._step_s = 0.0
        self._shown_s = 0.0
        self._oldest_s = 0.0  # when the first token came that has not been shown

    def end_step(self, num_streams: int, now_s: float) -> None:
        """`num_streams` streams got a token in this step. `now_s`: of any steady clock."""
        if self._is_open:
            self._oldest_s = now_s
        next_step_s = now_s + (now_s - self._step_s)  # if it takes as long as this one
        is_late = next_step_s - self._oldest_s > MAX_DELAY_S
        self._is_open = is_late or now_s - self._shown_s >= num_streams / MAX_EVENTS_PER_S
        self._step_s = now_s
        if self._is_open:
            self._shown_s = now_s

    def is_due(self, num_tokens: int) -> bool:
        """Whether `num_tokens` tokens of one stream that were not shown yet are to be shown now."""
        if self._interval is None:
            return self._is_open
        return num_tokens >= self._interval
