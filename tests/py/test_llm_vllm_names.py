"""Names and arguments of vLLM's that programs call: in its order, and with what says nothing."""

from __future__ import annotations

import asyncio

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("prometheus_client")

from flexinfer import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    AsyncLLMEngine,
    BeamSearchParams,
    EngineArgs,
    EngineDeadError,
    LLMEngine,
    RequestError,
    SamplingParams,
)
from flexinfer.config import EngineConfig
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


CHAT = [{"role": "user", "content": "hello"}]


def test_a_chat_takes_vllms_arguments_in_its_order(llm: LLM) -> None:
    template = "{{ messages[0]['content'] }}"
    expected = llm.chat(CHAT, GREEDY, use_tqdm=False, chat_template=template)[0]
    (found,) = llm.chat(CHAT, GREEDY, False, None, 1, template)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    (cut,) = llm.chat(CHAT, GREEDY, False, tokenization_kwargs={"truncate_prompt_tokens": 2})
    assert cut.prompt_token_ids is not None
    assert len(cut.prompt_token_ids) == 2


def test_a_chat_has_a_priority(llm: LLM) -> None:
    with pytest.raises(RequestError, match="1 prompts but 2 priorities"):
        llm.chat(CHAT, GREEDY, priority=[1, 2])
    with pytest.raises(RequestError, match="a chat template writes special tokens itself"):
        llm.chat(CHAT, GREEDY, tokenization_kwargs={"add_special_tokens": True})


def test_beams_take_vllms_arguments_in_its_order(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    (expected,) = llm.beam_search([{"prompt": "hello"}], params)
    (found,) = llm.beam_search([{"prompt": "hello"}], params, None, False, 1)
    assert [one.tokens for one in found.sequences] == [one.tokens for one in expected.sequences]


def test_a_prompt_is_tokenized_as_the_call_says(llm: LLM) -> None:
    (found,) = llm.generate("hello", GREEDY, tokenization_kwargs={"truncate_prompt_tokens": 1})
    assert found.prompt_token_ids is not None
    assert len(found.prompt_token_ids) == 1
    with pytest.raises(RequestError, match="mm_processor_kwargs"):
        llm.generate("hello", GREEDY, mm_processor_kwargs={"num_crops": 4})


def test_an_async_call_takes_what_says_nothing_here(model_path: str) -> None:
    async def scenario() -> int:
        args = AsyncEngineArgs(model=model_path, kv_cache_memory_bytes="8MiB", block_size=16)
        llm = AsyncLLMEngine.from_engine_args(args)
        await llm.check_health()
        cut = {"truncate_prompt_tokens": 1}
        stream = llm.generate("hi", GREEDY, trace_headers=None, tokenization_kwargs=cut)
        (*_, last) = [output async for output in stream]
        with pytest.raises(TypeError, match="no argument 'bogus'"):
            llm.generate("hi", GREEDY, bogus=1)
        llm.shutdown()
        with pytest.raises(EngineDeadError):
            await llm.check_health()
        return len(last.prompt_token_ids or ())

    assert asyncio.run(scenario()) == 1


def test_several_requests_are_aborted_at_once(model_path: str) -> None:
    async def scenario(llm: AsyncLLM) -> list[str | None]:
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        streams = [llm.generate("hello", params, name) for name in ("a", "b")]
        for stream in streams:
            await anext(stream)
        await llm.abort(["a", "b"])
        lasts = [[output async for output in stream][-1] for stream in streams]
        return [last.outputs[0].finish_reason for last in lasts]

    async def run() -> list[str | None]:
        async with AsyncLLM(model_path, kv_cache_memory_bytes="8MiB") as llm:
            return await scenario(llm)

    assert asyncio.run(run()) == ["abort", "abort"]


def test_engine_args_are_a_config_with_vllms_arguments(model_path: str) -> None:
    args = EngineArgs(model_path, block_size=16, max_num_seqs=2, cudagraph_capture_sizes=[1])
    assert (args.max_num_seqs, args.cuda_graph_sizes) == (2, (1,))
    engine = LLMEngine.from_engine_args(args)
    assert engine.config.max_num_seqs == 2
    engine.close()
    with pytest.raises(ValueError, match="pipeline_parallel_size=2"):
        EngineArgs(model=model_path, pipeline_parallel_size=2)


@pytest.mark.parametrize(
    "name",
    [
        "attention_backend",
        "distributed_timeout_s",
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "max_num_seqs",
        "seed",
    ],
)
def test_none_is_the_default(name: str) -> None:
    given = getattr(EngineConfig("x", **{name: None}), name)
    assert given == getattr(EngineConfig("x"), name)
    assert given is not None


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
