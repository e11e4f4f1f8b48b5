"""Names of vLLM's LLM that programs call: parts that wake up, metrics as values."""

from __future__ import annotations

import asyncio

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("prometheus_client")

from flexinfer import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from flexinfer.metrics.reader import Counter, Gauge, Histogram, Vector
from helpers.tiny_models import make_model

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.mark.parametrize(("tags", "awake"), [(None, True), (["kv_cache"], True)])
def test_the_part_that_sleeps_is_woken(llm: LLM, tags: list[str] | None, awake: bool) -> None:
    llm.sleep()
    assert llm.wake_up(tags) is awake
    assert not llm.llm_engine.is_sleeping()


@pytest.mark.parametrize("tags", [["weights"], ["scheduling", "weights"], []])
def test_what_never_sleeps_needs_no_waking(llm: LLM, tags: list[str]) -> None:
    llm.sleep()
    assert llm.wake_up(tags) is False
    assert llm.llm_engine.is_sleeping()
    assert llm.wake_up(["weights", "kv_cache"]) is True


def test_a_part_that_there_is_not_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="each of tags must be one of 'weights', 'kv_cache'"):
        llm.wake_up(["kv"])


def test_an_async_engine_wakes_its_parts_too(model_path: str) -> None:
    async def wake() -> list[bool]:
        async with AsyncLLM(model_path, kv_cache_memory_bytes="8MiB") as llm:
            await llm.sleep()
            return [await llm.wake_up(["weights"]), await llm.wake_up(["kv_cache"])]

    assert asyncio.run(wake()) == [False, True]


def test_metrics_are_plain_values() -> None:
    speculation = {"method": "ngram", "num_speculative_tokens": 3}
    with LLM(
        make_model("llama"),
        skip_tokenizer_init=True,
        speculative_config=speculation,
        kv_cache_memory_bytes="8MiB",
    ) as llm:
        prompts = [{"prompt_token_ids": [1, 2, 3] * 8}, {"prompt_token_ids": [4, 5] * 9}]
        llm.generate(prompts, GREEDY, use_tqdm=False)  # type: ignore[arg-type]
        found = {metric.name: metric for metric in llm.get_metrics()}
    tokens, running = found["flexinfer:generation_tokens"], found["flexinfer:num_requests_running"]
    assert isinstance(tokens, Counter)
    assert tokens.value == 24
    assert tokens.labels["engine"] == "0"
    assert isinstance(running, Gauge)
    assert running.value == 0
    latency = found["flexinfer:e2e_request_latency_seconds"]
    assert isinstance(latency, Histogram)
    assert latency.count == latency.buckets["+Inf"] == 2
    assert latency.sum > 0
    assert "le" not in latency.labels
    accepted = found["flexinfer:spec_decode_num_accepted_tokens_per_pos"]
    assert isinstance(accepted, Vector)
    assert len(accepted.values) == 3
    assert "position" not in accepted.labels


def test_defaults_can_be_changed(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    params.max_tokens, params.temperature = 5, 0
    (output,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 5
    assert llm.get_default_sampling_params().max_tokens != 5


@pytest.mark.parametrize("n", [1, 2])
def test_a_request_keeps_the_params_that_it_was_added_with(llm: LLM, n: int) -> None:
    params = SamplingParams(n=n, max_tokens=6, ignore_eos=True, stop_token_ids=[])
    engine = llm.llm_engine
    engine.add_request("a", {"prompt_token_ids": [1, 2, 3]}, params)
    engine.step()
    params.max_tokens, params.n, params.ignore_eos = 1, 1, False
    params.stop_token_ids = list(range(64))
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert [len(one.token_ids) for one in outputs[0].outputs] == [6] * n


def test_an_async_request_keeps_what_was_given(model_path: str) -> None:
    async def run() -> tuple[int, float]:
        async with AsyncLLM(model_path, kv_cache_memory_bytes="8MiB") as llm:
            params = SamplingParams(max_tokens=6, ignore_eos=True)
            outputs = llm.generate([1, 2, 3], params)
            params.max_tokens = 1
            (*_, last) = [output async for output in outputs]
            beams = BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True)
            search = asyncio.ensure_future(llm.beam_search([1, 2, 3], beams))
            await asyncio.sleep(0)
            beams.length_penalty = -5.0
            best = (await search).sequences[0]
            return len(last.outputs[0].token_ids), best.score / best.cum_logprob

    assert asyncio.run(run()) == (6, pytest.approx(1 / 4))
