"""When requests are sent, and what the summary says of their outcomes."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

aiohttp = pytest.importorskip("aiohttp")

from flexinfer.loadgen.load import run_load
from flexinfer.loadgen.request import LoadRequest, Outcome
from flexinfer.loadgen.summary import parse_goodput, summarize

# Running.


def requests(count: int) -> list[LoadRequest]:
    return [LoadRequest(f"request {idx}", 2, 4) for idx in range(count)]


@pytest.mark.parametrize("limit", [1, 3, None])
def test_no_more_requests_run_than_may(limit: int | None) -> None:
    running = most = 0
    seen: list[object] = []

    async def send(request: LoadRequest) -> Outcome:
        nonlocal running, most
        running += 1
        most = max(most, running)
        seen.append(request.prompt)
        for _ in range(5):
            await asyncio.sleep(0)
        running -= 1
        return Outcome(text=str(request.prompt))

    outcomes, _ = asyncio.run(run_load(requests(12), [0.0] * 12, send, max_concurrency=limit))
    assert most == (limit or 12)
    assert [outcome.text for outcome in outcomes] == [r.prompt for r in requests(12)]
    assert len(seen) == 12


def test_requests_start_no_earlier_than_planned() -> None:
    async def send(request: LoadRequest) -> Outcome:
        return Outcome()

    arrivals = [0.0, 0.05, 0.05, 0.12]
    outcomes, duration_s = asyncio.run(run_load(requests(4), arrivals, send))
    assert all(o.start_s >= at for o, at in zip(outcomes, arrivals, strict=True))
    assert duration_s >= 0.12


# Measuring.


def outcome(first_s: float, gaps_s: list[float], start_s: float = 0.0) -> Outcome:
    return Outcome(
        start_s=start_s,
        num_prompt_tokens=10,
        num_output_tokens=len(gaps_s) + 1,
        first_token_s=first_s,
        inter_token_s=gaps_s,
        latency_s=first_s + sum(gaps_s),
    )


def test_the_summary_is_that_of_numpy_and_of_vllms_definitions() -> None:
    rng = np.random.default_rng(0)
    outcomes = [outcome(rng.random(), list(rng.random(rng.integers(1, 6)))) for _ in range(50)]
    found = summarize(outcomes, 20.0, [50, 99]).as_dict()
    firsts = np.array([o.first_token_s for o in outcomes]) * 1e3
    per_token = np.array([np.mean(o.inter_token_s) for o in outcomes]) * 1e3
    gaps = np.concatenate([o.inter_token_s for o in outcomes]) * 1e3
    for name, values in (("ttft", firsts), ("tpot", per_token), ("itl", gaps)):
        assert found[f"mean_{name}_ms"] == pytest.approx(values.mean())
        assert found[f"median_{name}_ms"] == found[f"p50_{name}_ms"]
        assert found[f"p99_{name}_ms"] == pytest.approx(np.percentile(values, 99))
    assert found["request_throughput"] == 50 / 20
    assert found["output_throughput"] == sum(o.num_output_tokens for o in outcomes) / 20


def test_goodput_counts_requests_within_all_limits() -> None:
    outcomes = [
        outcome(0.1, [0.01, 0.01]),
        outcome(0.9, [0.01]),
        outcome(0.1, [0.5]),
        outcome(0.1, []),
        Outcome(error="refused"),
    ]
    limits = parse_goodput(["ttft:500 tpot:50"])
    assert limits == {"ttft": 500.0, "tpot": 50.0}
    summary = summarize(outcomes, 10.0, goodput=limits)
    assert summary.goodput == 2 / 10
    assert (summary.num_completed, summary.num_failed) == (4, 1)


@pytest.mark.parametrize("text", ["ttft", "ttft:x", "speed:1", "ttft:-1"])
def test_a_limit_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--goodput"):
        parse_goodput([text])


def test_the_most_requests_at_once_are_found() -> None:
    outcomes = [outcome(1.0, [], start_s) for start_s in (0.0, 0.5, 0.9, 1.0, 3.0)]
    assert summarize(outcomes, 4.0).max_concurrent_requests == 3
