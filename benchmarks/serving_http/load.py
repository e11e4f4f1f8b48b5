"""Load: the prompts of a round, all at once: the generator of `flexinfer bench serve` with a client
of its own (lean_client.py)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import uvloop
from lean_client import LeanClient

from flexinfer.loadgen.client import Target
from flexinfer.loadgen.load import run_load
from flexinfer.loadgen.request import LoadRequest, Outcome
from flexinfer.loadgen.summary import summarize

PERCENTILES = (50.0, 90.0, 99.0)


@dataclass(frozen=True)
class Answers:
    """Of one round."""

    texts: list[str]
    num_new_tokens: int
    seconds: float
    load_cpu_s: float
    """CPU time of this process meanwhile: what the load generator itself takes."""
    latencies_ms: dict[str, float]
    """Such as `ttft_p50_ms`; a whole answer has `e2el` alone."""


def send(
    url: str,
    model: str,
    prompts: list[list[int]],
    num_new: int,
    *,
    stream: bool,
    salt: str,
    options: dict[str, Any] | None = None,
) -> Answers:
    """Greedy, end of text ignored. `salt` keeps a round from finding the prefixes of others.
    `options`: what requests say besides.

    Raises RuntimeError if a request fails.
    """
    given: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "cache_salt": salt}
    given |= options or {}
    if not stream:
        given["stream"] = False
    target = Target(url, model, options=given)
    requests = [LoadRequest(prompt, len(prompt), num_new) for prompt in prompts]
    client = LeanClient(target)
    start_cpu_s = time.process_time()
    outcomes, seconds = uvloop.run(_send_all(client, requests))
    load_cpu_s = time.process_time() - start_cpu_s
    client.read()
    failed = [outcome.error for outcome in outcomes if outcome.error]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(requests)} requests failed: {failed[0]}")
    summary = summarize(outcomes, seconds, PERCENTILES)
    return Answers(
        [outcome.text for outcome in outcomes],
        summary.total_output_tokens,
        seconds,
        load_cpu_s,
        {
            f"{name}_p{percentile:g}_ms": round(value, 2)
            for name, values in summary.latencies.items()
            for percentile, value in values.percentiles.items()
        },
    )


async def _send_all(client: LeanClient, requests: list[LoadRequest]) -> tuple[list[Outcome], float]:
    return await run_load(requests, [0.0] * len(requests), client.send)
