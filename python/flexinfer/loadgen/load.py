"""Load: issues requests at their times, with a bound on how many run at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from flexinfer.loadgen.request import LoadRequest, Outcome

Send = Callable[[LoadRequest], Awaitable[Outcome]]


async def run_load(
    requests: Sequence[LoadRequest],
    arrivals_s: Sequence[float],
    send: Send,
    *,
    max_concurrency: int | None = None,
    on_done: Callable[[Outcome], None] = lambda _: None,
) -> tuple[list[Outcome], float]:
    """Outcomes in the order of the requests, and the seconds that all took.

    A request that comes while `max_concurrency` run waits at the client: that wait is not part of
    its latency, as in `vllm bench serve`.
    """
    gate: AbstractAsyncContextManager[object] = (
        nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    )
    begin_s = time.perf_counter()

    async def one(request: LoadRequest, issue_delay_s: float) -> Outcome:
        async with gate:
            start_s = time.perf_counter() - begin_s
            outcome = await send(request)
        outcome.start_s, outcome.issue_delay_s = start_s, issue_delay_s
        on_done(outcome)
        return outcome

    tasks = []
    try:
        for request, arrival_s in zip(requests, arrivals_s, strict=True):
            wait_s = arrival_s - (time.perf_counter() - begin_s)
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            delay_s = max(0.0, time.perf_counter() - begin_s - arrival_s)
            tasks.append(asyncio.create_task(one(request, delay_s)))
        outcomes = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return list(outcomes), time.perf_counter() - begin_s
