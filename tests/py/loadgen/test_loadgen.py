"""The load generator: arrivals, prompts, traces, what it measures, and what it does with errors."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

aiohttp = pytest.importorskip("aiohttp")
from aiohttp import web

from flexinfer.loadgen.arrivals import gamma_arrivals
from flexinfer.loadgen.client import Backend, Client, Target
from flexinfer.loadgen.load import run_load
from flexinfer.loadgen.request import LoadRequest, Outcome
from flexinfer.loadgen.summary import parse_goodput, summarize
from flexinfer.loadgen.trace import read_trace
from flexinfer.loadgen.vocabulary import TokenVocabulary, WordVocabulary
from flexinfer.loadgen.workload import (
    RandomLengths,
    TraceScale,
    custom_workload,
    random_workload,
    trace_workload,
)
from helpers.tiny_models import make_tokenizer

# Arrivals.


def test_poisson_gaps_have_the_mean_and_spread_of_the_rate() -> None:
    gaps = np.diff(gamma_arrivals(20_000, 50.0, 1.0, random.Random(0)))
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.05)


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_burstiness_is_the_shape_of_the_gaps(burstiness: float) -> None:
    gaps = np.diff(gamma_arrivals(20_000, 10.0, burstiness, random.Random(1)))
    assert gaps.mean() == pytest.approx(0.1, rel=0.05)
    assert (gaps.std() / gaps.mean()) ** 2 == pytest.approx(1 / burstiness, rel=0.1)


def test_an_infinite_rate_issues_all_at_once() -> None:
    assert gamma_arrivals(3, float("inf"), 1.0, random.Random()) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("rate", "burstiness"), [(0, 1), (-1, 1), (float("nan"), 1), (1, 0)])
def test_rates_that_can_not_be_are_refused(rate: float, burstiness: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        gamma_arrivals(1, rate, burstiness, random.Random())


# Prompts.


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    make_tokenizer().save_pretrained(tmp_path)
    return tmp_path / "tokenizer.json"


def test_random_prompts_share_a_prefix_and_have_the_lengths_asked_for(tokenizer_file: Path) -> None:
    vocabulary = TokenVocabulary(tokenizer_file, as_text=False)
    load = random_workload(40, RandomLengths(30, 8, 0.5, prefix_len=10), vocabulary, seed=3)
    prompts: list[Any] = [request.prompt for request in load.requests]
    assert len({tuple(prompt[:10]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 40
    assert {len(prompt) for prompt in prompts} <= set(range(25, 56))
    assert {request.num_output_tokens for request in load.requests} <= set(range(4, 13))
    assert [request.num_prompt_tokens for request in load.requests] == list(map(len, prompts))


def test_prompts_hold_no_special_tokens(tokenizer_file: Path) -> None:
    drawn = TokenVocabulary(tokenizer_file, as_text=False).draw(5000, random.Random(0))
    assert set(drawn).isdisjoint(make_tokenizer().all_special_ids)


def test_a_seed_draws_the_same_prompts_again() -> None:
    lengths = RandomLengths(20, 8, 0.3)
    first, second = (random_workload(5, lengths, WordVocabulary(), 7) for _ in range(2))
    assert first == second
    assert random_workload(5, lengths, WordVocabulary(), 8) != first


def test_custom_prompts_are_drawn_again_when_they_run_out(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a b"}\n\n{"prompt": "c", "output_tokens": 3}\n')
    load = custom_workload(file, 4, 9, seed=0)
    assert sorted((str(r.prompt), r.num_output_tokens) for r in load.requests) == [
        *[("a b", 9)] * 2,
        *[("c", 3)] * 2,
    ]


def test_a_line_that_is_no_prompt_is_named(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(ValueError, match="line 2"):
        custom_workload(file, 4, 9, seed=0)


# Traces.

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9805900,396,109\n"
)
VATTENTION = (
    "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n7564.0,192.0,7756.0,3\n"
)
MOONCAKE = (
    '{"timestamp": 500, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}\n'
    '{"timestamp": 0, "input_length": 600, "output_length": 4, "hash_ids": [0, 9]}\n'
)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("azure.csv", AZURE, [(0.0, 374, 44), (4.3, 396, 109)]),
        ("lengths.csv", VATTENTION, [(None, 7564, 192)]),
        ("mooncake.jsonl", MOONCAKE, [(0.0, 600, 4), (0.5, 1100, 5)]),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_traces_are_read_in_order_of_time(
    name: str, text: str, expected: list[Any], packed: bool, tmp_path: Path
) -> None:
    file = tmp_path / (f"{name}.gz" if packed else name)
    file.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    entries = read_trace(file)
    assert [(e.num_prompt_tokens, e.num_output_tokens) for e in entries] == [
        (prompt, output) for _, prompt, output in expected
    ]
    assert [e.time_s for e in entries] == [
        time_s if time_s is None else pytest.approx(time_s) for time_s, _, _ in expected
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [("a,b\n1,2\n", "no trace format"), ("", "no requests"), (AZURE + "x,y,z\n", "request 3")],
)
def test_a_file_that_is_no_trace_is_refused(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(text)
    with pytest.raises(ValueError, match=says):
        read_trace(file)


def test_equal_blocks_of_a_trace_are_equal_text(tmp_path: Path, tokenizer_file: Path) -> None:
    file = tmp_path / "mooncake.jsonl"
    file.write_text(MOONCAKE)
    vocabulary = TokenVocabulary(tokenizer_file, as_text=False)
    load = trace_workload(file, None, TraceScale(time=2.0, length=1 / 16), vocabulary, seed=0)
    first, second = ([*request.prompt] for request in load.requests)
    assert load.arrivals_s == [0.0, 1.0]
    assert (len(first), len(second)) == (round(600 / 16), round(1100 / 16))
    assert first[:32] == second[:32]
    assert first[32:] != second[32 : len(first)]


def test_lengths_of_a_trace_are_bounded(tmp_path: Path) -> None:
    file = tmp_path / "azure.csv"
    file.write_text(AZURE)
    scale = TraceScale(length=0.5, max_input_len=190, max_output_len=30)
    load = trace_workload(file, 2, scale, WordVocabulary(), seed=0)
    assert [r.num_prompt_tokens for r in load.requests] == [187, 190]
    assert [r.num_output_tokens for r in load.requests] == [22, 30]


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


# The client, against an endpoint on this machine that says what the test has written down.


@asynccontextmanager
async def endpoint(handler: Any) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    app.router.add_post("/v1/chat/completions", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def streams(*events: Any, end: bytes = b"data: [DONE]\n\n") -> Any:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(end)
        return response

    return handle


def ask(handler: Any, backend: Backend = "openai", options: Any = None) -> Outcome:
    async def run() -> Outcome:
        async with (
            endpoint(handler) as url,
            Client(Target(url, "m", backend, options=options or {})) as client,
        ):
            return await client.send(LoadRequest("hello", 1, 3))

    return asyncio.run(run())


def text(piece: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": piece}]}


def delta(**content: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": content}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}


def test_a_completion_is_measured_by_its_pieces_and_counted_by_the_server() -> None:
    found = ask(streams(text("a"), text("b"), text(""), USAGE))
    assert (found.text, found.error) == ("ab", "")
    assert (found.num_prompt_tokens, found.num_output_tokens) == (7, 3)
    assert len(found.inter_token_s) == 1
    assert found.first_token_s is not None
    assert 0 < found.first_token_s <= found.latency_s


def test_the_first_token_of_a_chat_is_not_its_role() -> None:
    found = ask(streams(delta(role="assistant"), delta(content="hi")), "openai-chat")
    assert (found.text, found.num_output_tokens, found.inter_token_s) == ("hi", 1, [])


def test_tokens_without_text_are_no_failure() -> None:
    found = ask(streams(text(""), text(""), USAGE))
    assert found.is_success
    assert found.num_output_tokens == 3


def test_the_request_says_what_was_asked_for() -> None:
    seen: dict[str, Any] = {}

    async def handle(request: web.Request) -> web.StreamResponse:
        seen.update(await request.json())
        answer: web.StreamResponse = await streams(delta(content="x"))(request)
        return answer

    ask(handle, "openai-chat", {"ignore_eos": True, "temperature": 0.0})
    assert seen == {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0.0,
    }


@pytest.mark.parametrize(
    ("backend", "choice"),
    [("openai", {"text": "abc"}), ("openai-chat", {"message": {"content": "abc"}})],
)
def test_a_whole_answer_is_measured_at_its_end(backend: Backend, choice: dict[str, Any]) -> None:
    seen: dict[str, Any] = {}

    async def handle(request: web.Request) -> web.StreamResponse:
        seen.update(await request.json())
        usage = {"prompt_tokens": 7, "completion_tokens": 3}
        return web.json_response({"choices": [choice], "usage": usage})

    found = ask(handle, backend, {"stream": False})
    assert (found.text, found.num_prompt_tokens, found.num_output_tokens) == ("abc", 7, 3)
    assert (found.first_token_s, found.inter_token_s) == (None, [])
    assert "stream_options" not in seen


def test_a_whole_answer_without_choices_is_a_failure() -> None:
    async def handle(_: web.Request) -> web.StreamResponse:
        return web.json_response({"choices": [], "usage": {}})

    assert "no completion" in ask(handle, options={"stream": False}).error


async def refuses(_: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "full"}}, status=429)


@pytest.mark.parametrize(
    ("handler", "says"),
    [
        (refuses, "429: full"),
        (streams(text("a"), {"error": {"message": "broken"}}), "broken"),
        (streams(end=b"data: [DONE]\n\n"), "without an answer"),
        (streams(end=b"data: {not json\n\n"), "JSONDecodeError"),
    ],
)
def test_failures_are_outcomes(handler: Any, says: str) -> None:
    found = ask(handler)
    assert not found.is_success
    assert says in found.error


def test_nobody_there_is_an_outcome() -> None:
    async def run() -> Outcome:
        async with Client(Target("http://127.0.0.1:9", "m")) as client:
            return await client.send(LoadRequest("hello", 1, 3))

    assert "Connect" in asyncio.run(run()).error
