"""Latency counts and histograms of requests, against a plain model and in an engine that runs."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from flexinfer.metrics.requests import LENGTH_BUCKETS, Histogram, RequestStats
from flexinfer.outputs import CompletionOutput, RequestMetrics, RequestOutput
from flexinfer.types import FinishReason


def test_a_histogram_counts_as_prometheus_does() -> None:
    rng = random.Random(0)
    values = [rng.choice((0.5, 1.0, 1.5, 2.0, 9.0)) for _ in range(500)]
    histogram = Histogram((1.0, 2.0, 4.0))
    for value in values:
        histogram.observe(value)
    for bound, count in histogram.cumulative():
        assert count == sum(value <= bound for value in values)
    assert histogram.count == len(values)
    assert histogram.sum == pytest.approx(sum(values))


def output(metrics: RequestMetrics, reason: FinishReason, num_prompt: int = 7) -> RequestOutput:
    completion = CompletionOutput(0, "", [], finish_reason=reason)
    return RequestOutput("r", None, [1] * num_prompt, [completion], True, metrics)


def test_the_times_of_a_request_are_told_apart() -> None:
    stats = RequestStats()
    metrics = RequestMetrics(arrival_time=10.0, first_scheduled_time=13.0)
    for now_s in (18.0, 18.5, 19.5, 21.0):
        stats.note_tokens(metrics, 7, 1, now_s)
    stats.note_end(output(metrics, "length"), 21.25)
    sums = {
        "first_token_s": 8.0,
        "inter_token_s": 3.0,
        "per_output_token_s": 1.0,
        "end_to_end_s": 11.25,
        "queue_s": 3.0,
        "prefill_s": 5.0,
        "decode_s": 3.25,
        "request_prompt_tokens": 7,
        "request_generation_tokens": 4,
    }
    assert {name: getattr(stats, name).sum for name in sums} == sums
    assert stats.inter_token_s.count == 3
    assert (stats.prompt_tokens, stats.generation_tokens) == (7, 4)
    assert stats.finished == {"length": 1}


def test_samples_of_one_prompt_count_each_token_and_one_request() -> None:
    stats = RequestStats()
    metrics = RequestMetrics(arrival_time=0.0, first_scheduled_time=0.0)
    stats.note_tokens(metrics, 5, 3, 1.0)
    stats.note_tokens(metrics, 5, 3, 2.0)
    stats.note_tokens(metrics, 5, 1, 4.0)
    stats.note_end(output(metrics, "stop", 5), 4.0)
    assert (stats.prompt_tokens, stats.generation_tokens) == (5, 7)
    assert (stats.inter_token_s.count, stats.inter_token_s.sum) == (4, 5.0)
    assert (stats.per_output_token_s.count, stats.per_output_token_s.sum) == (1, 1.5)


def test_tokens_of_one_step_come_together() -> None:
    """As in vLLM: a caller waits for the step, however many tokens it gives."""
    stats = RequestStats()
    metrics = RequestMetrics(arrival_time=0.0, first_scheduled_time=0.0)
    stats.note_tokens(metrics, 5, 1, 1.0)
    stats.note_tokens(metrics, 5, 4, 3.0, num_each=4)
    stats.note_tokens(metrics, 5, 1, 4.0)
    stats.note_end(output(metrics, "length", 5), 4.0)
    assert (stats.inter_token_s.count, stats.inter_token_s.sum) == (2, 3.0)
    assert stats.inter_token_s.cumulative()[15] == (2.5, 2)
    assert stats.per_output_token_s.sum == 3 / 5


def test_a_request_that_never_ran_has_only_an_end() -> None:
    stats = RequestStats()
    stats.note_end(output(RequestMetrics(arrival_time=1.0), "abort"), 3.0)
    assert stats.finished == {"abort": 1}
    assert stats.end_to_end_s.sum == 2.0
    assert stats.queue_s.count == stats.prefill_s.count == stats.first_token_s.count == 0


def test_a_copy_stands_still() -> None:
    stats = RequestStats()
    before = stats.copy()
    metrics = RequestMetrics(arrival_time=0.0)
    stats.note_tokens(metrics, 3, 1, 1.0)
    stats.note_end(output(metrics, "stop"), 1.0)
    assert before.as_dict() == RequestStats().as_dict()
    assert stats.as_dict()["finished"] == {"stop": 1}


def test_an_engine_counts_what_it_serves(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from flexinfer import LLM, SamplingParams
    from helpers.tiny_models import make_model, random_prompts

    prompts = random_prompts((5, 30, 12))
    with LLM(make_model("llama"), skip_tokenizer_init=True, kv_cache_memory_bytes="16MiB") as llm:
        llm.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True), use_tqdm=False)
        llm.generate(prompts[0], SamplingParams(n=2, max_tokens=4), use_tqdm=False)
        llm.engine.add_request("gone", prompts[1])
        llm.engine.step()
        llm.engine.abort_request("gone")
        stats = llm.engine.stats().requests
    assert stats is not None
    assert stats.prompt_tokens == 5 + 30 + 12 + 5 + 30
    assert stats.generation_tokens == 3 * 6 + 2 * 4 + 1
    assert stats.finished == {"length": 4, "abort": 1}
    assert stats.inter_token_s.count == 3 * 5 + 2 * 3
    assert stats.first_token_s.count == stats.end_to_end_s.count == stats.queue_s.count == 5


def test_lengths_have_bounds_that_grow() -> None:
    assert list(LENGTH_BUCKETS) == sorted(set(LENGTH_BUCKETS))


def test_times_have_the_names_of_vllms_second_engine_too() -> None:
    metrics = RequestMetrics(10.0, 13.0, 18.0, 21.0, num_generated_tokens=4)
    assert (metrics.queued_ts, metrics.scheduled_ts) == (10.0, 13.0)
    assert (metrics.first_token_ts, metrics.last_token_ts) == (18.0, 21.0)
    assert (metrics.first_token_latency, metrics.num_generation_tokens) == (8.0, 4)
    begun = RequestMetrics(10.0)
    assert (begun.scheduled_ts, begun.first_token_ts, begun.last_token_ts) == (0.0, 0.0, 0.0)
    assert begun.first_token_latency == 0.0
