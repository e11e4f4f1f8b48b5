"""AsyncLLM: many callers, cancellation, and failures that reach whom they concern."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer import (
    AsyncLLM,
    BeamSearchParams,
    EngineDeadError,
    EngineError,
    LLMEngine,
    RequestError,
    RequestOutputKind,
    SamplingParams,
)
from flexinfer.async_llm import MAX_WAITING
from flexinfer.config import EngineConfig
from helpers.async_kit import GREEDY, LONG, last, until_idle, with_llm
from helpers.idle_manager import available_bytes
from helpers.tiny_models import make_model, make_tokenizer, random_prompts, reference


@pytest.fixture(scope="module", autouse=True)
def _known_references() -> None:
    """Asked for before any engine's thread uses the same model."""
    reference("llama", (4, 5), 12)


def break_layer(engine: LLMEngine) -> Callable[[], None]:
    """Make the model fail; returns what repairs it."""
    backend, forward = engine.runner.backend, engine.runner.backend.forward

    def broken(*_: Any) -> Any:
        raise RuntimeError("the device is gone")

    backend.forward = broken  # type: ignore[method-assign]
    return lambda: setattr(backend, "forward", forward)


def test_many_callers_get_each_their_tokens() -> None:
    prompts = random_prompts((20, 3, 33, 8, 1, 50, 7, 12, 30, 2, 2, 40))

    async def scenario(llm: AsyncLLM) -> None:
        finals = await asyncio.gather(*(last(llm.generate(p, GREEDY)) for p in prompts))
        for prompt, final in zip(prompts, finals, strict=True):
            assert final.outputs[0].token_ids == reference("llama", tuple(prompt), 12)

    with_llm(scenario)


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_outputs_come_as_output_kind_says(kind: RequestOutputKind) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        params = SamplingParams(temperature=0, max_tokens=6, output_kind=kind)
        outputs = [output async for output in llm.generate([1, 2, 3], params, "a")]
        expected = reference("llama", (1, 2, 3), 6)
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert {output.request_id for output in outputs} == {"a"}
        pieces = [output.outputs[0].token_ids for output in outputs]
        if kind is RequestOutputKind.DELTA:
            assert pieces == [[token_id] for token_id in expected]
        else:
            assert pieces[-1] == expected
            assert [len(piece) for piece in pieces] == sorted({len(piece) for piece in pieces})
        assert (len(pieces) == 1) or kind is not RequestOutputKind.FINAL_ONLY

    with_llm(scenario)


def test_a_slow_caller_gets_deltas_joined() -> None:
    """Nothing is lost, and what waits for the caller is bounded."""

    async def scenario(llm: AsyncLLM) -> None:
        params = SamplingParams(
            temperature=1, n=3, seed=1, max_tokens=100, logprobs=1, ignore_eos=True
        )
        whole = await last(llm.generate([1, 2, 3], params))
        tokens: list[list[int]] = [[], [], []]
        logprobs: list[list[Any]] = [[], [], []]
        num_outputs = 0
        deltas = replace(params, output_kind=RequestOutputKind.DELTA)
        async with aclosing(llm.generate([1, 2, 3], deltas)) as outputs:
            async for output in outputs:
                num_outputs += 1
                for one in output.outputs:
                    tokens[one.index] += one.token_ids
                    logprobs[one.index] += one.logprobs or []
                await until_idle(llm)
        assert num_outputs <= MAX_WAITING + 1
        assert tokens == [one.token_ids for one in whole.outputs]
        assert logprobs == [one.logprobs for one in whole.outputs]

    with_llm(scenario)


def test_a_slow_caller_gets_the_newest_cumulative_output() -> None:
    async def scenario(llm: AsyncLLM) -> None:
        lengths = []
        async with aclosing(llm.generate([1, 2, 3], GREEDY)) as outputs:
            async for output in outputs:
                lengths.append(len(output.outputs[0].token_ids))
                await until_idle(llm)
        assert lengths[-1] == 12
        assert len(lengths) <= 2

    with_llm(scenario)


def test_samples_and_beams_are_served_side_by_side() -> None:
    async def scenario(llm: AsyncLLM) -> None:
        (prompt,) = random_prompts((20,))
        params = SamplingParams(n=3, temperature=0, max_tokens=5)
        beams, final = await asyncio.gather(
            llm.beam_search(prompt, BeamSearchParams(beam_width=3, max_tokens=5)),
            last(llm.generate(prompt, params)),
        )
        expected = reference("llama", tuple(prompt), 5)
        assert [completion.token_ids for completion in final.outputs] == [expected] * 3
        assert len(beams.sequences) == 3

    with_llm(scenario)


def test_text_prompts_are_tokenized() -> None:
    async def main() -> None:
        model = make_model("llama")
        settings = {"kv_cache_memory_bytes": 16 << 20, "tokenizer": make_tokenizer()}
        async with AsyncLLM.from_engine_args(EngineConfig(model, **settings)) as llm:
            final = await last(llm.generate("!?", GREEDY))
            assert final.prompt == "!?"
            assert llm.get_tokenizer() is make_tokenizer()

    asyncio.run(main())


# Leaving early.


def test_breaking_out_of_the_loop_aborts() -> None:
    async def scenario(llm: AsyncLLM) -> None:
        before = await llm.call(lambda engine: available_bytes(engine.manager))
        async for _ in llm.generate([1, 2, 3], LONG):
            break
        await until_idle(llm)
        assert await llm.call(lambda engine: available_bytes(engine.manager)) == before
        stats = await llm.call(lambda engine: engine.stats())
        assert stats.requests is not None
        assert stats.requests.finished == {"abort": 1}, "nothing was computed to its end for nobody"

    with_llm(scenario)


@pytest.mark.parametrize("num_outputs", [0, 1, 5])
def test_cancelling_the_task_aborts(num_outputs: int) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        seen = asyncio.Event()

        async def caller() -> None:
            num_seen = 0
            async for _ in llm.generate([1, 2, 3], LONG):
                num_seen += 1
                if num_seen >= num_outputs:
                    seen.set()
            await asyncio.Event().wait()

        others = asyncio.create_task(last(llm.generate([4, 5], GREEDY)))
        task = asyncio.create_task(caller())
        await (seen.wait() if num_outputs else asyncio.sleep(0))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await others).outputs[0].token_ids == reference("llama", (4, 5), 12)
        await until_idle(llm)

    with_llm(scenario)


def test_cancelling_a_beam_search_frees_it() -> None:
    async def scenario(llm: AsyncLLM) -> None:
        params = BeamSearchParams(beam_width=4, max_tokens=200)
        task = asyncio.create_task(llm.beam_search([1, 2, 3], params))
        while not await llm.call(lambda engine: engine.has_unfinished_requests()):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_idle(llm)

    with_llm(scenario)


def test_cancelling_before_the_request_is_queued_leaves_its_namesake_alone() -> None:
    async def scenario(llm: AsyncLLM) -> None:
        first = asyncio.create_task(last(llm.generate([4, 5], GREEDY, "a")))
        await asyncio.sleep(0)
        second = asyncio.create_task(last(llm.generate([6], LONG, "a")))
        await asyncio.sleep(0)
        second.cancel()
        assert (await first).outputs[0].token_ids == reference("llama", (4, 5), 12)

    with_llm(scenario)


def test_abort_ends_the_loop_with_a_last_output() -> None:
    async def scenario(llm: AsyncLLM) -> None:
        reasons = []
        async for output in llm.generate([1, 2, 3], LONG, "a"):
            reasons.append(output.outputs[0].finish_reason)
            if len(reasons) == 2:
                await llm.abort("a")
        assert reasons[-1] == "abort"
        await llm.abort("unknown")

    with_llm(scenario)


def test_random_cancellations_leave_nothing_behind() -> None:
    generator = torch.Generator().manual_seed(0)
    prompts = random_prompts(tuple(range(3, 43)))
    for prompt in prompts:  # now: the engine's thread uses the same model
        reference("llama", tuple(prompt), 12)

    async def caller(llm: AsyncLLM, prompt: list[int], n: int) -> None:
        params = SamplingParams(n=n, temperature=0, max_tokens=12)
        final = await last(llm.generate(prompt, params))
        for completion in final.outputs:
            assert completion.token_ids == reference("llama", tuple(prompt), 12)

    async def scenario(llm: AsyncLLM) -> None:
        tasks = [
            asyncio.create_task(caller(llm, prompt, 1 + i % 3)) for i, prompt in enumerate(prompts)
        ]
        for i in torch.randperm(len(tasks), generator=generator).tolist()[: len(tasks) // 2]:
            await asyncio.sleep(0.004)
            tasks[i].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        errors = [r for r in results if isinstance(r, Exception)]
        assert not errors
        assert any(r is None for r in results)
        await until_idle(llm)

    with_llm(scenario, enable_prefix_caching=True, kv_cache_memory_bytes=512 << 10)


# Errors.


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "the prompt is empty"),
        ([5, 9999], GREEDY, "token id 9999"),
        ([5], SamplingParams(n=9), "n is 9, but max_num_seqs is 8"),
        ("text", GREEDY, "needs a tokenizer"),
        ([5], BeamSearchParams(beam_width=2), "must be SamplingParams"),
    ],
)
def test_a_bad_request_is_refused_and_disturbs_nobody(
    prompt: Any, params: Any, message: str
) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        good = asyncio.create_task(last(llm.generate([4, 5], GREEDY)))
        with pytest.raises(RequestError, match=message):
            await last(llm.generate(prompt, params))
        assert (await good).outputs[0].token_ids == reference("llama", (4, 5), 12)

    with_llm(scenario)


def test_an_id_in_use_is_refused_and_its_owner_goes_on() -> None:
    async def scenario(llm: AsyncLLM) -> None:
        first = asyncio.create_task(last(llm.generate([4, 5], GREEDY, "a")))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="'a' is in use"):
            await last(llm.generate([6], GREEDY, "a"))
        assert (await first).outputs[0].finish_reason == "length"

    with_llm(scenario)


def test_a_failed_step_reaches_its_callers_and_later_ones_are_served() -> None:
    async def scenario(llm: AsyncLLM) -> None:
        repair = await llm.call(break_layer)
        results = await asyncio.gather(
            *(last(llm.generate([4, i], GREEDY)) for i in range(12)), return_exceptions=True
        )
        assert {type(result) for result in results} == {EngineError}
        assert {type(result.__cause__) for result in results} == {RuntimeError}
        await llm.call(lambda engine: repair())
        assert llm.is_running
        final = await last(llm.generate([4, 5], GREEDY))
        assert final.outputs[0].token_ids == reference("llama", (4, 5), 12)

    with_llm(scenario)


def test_a_failed_engine_reaches_every_caller() -> None:
    async def scenario(llm: AsyncLLM) -> None:
        tasks = [asyncio.create_task(last(llm.generate([4, i], LONG))) for i in range(12)]
        while not await llm.call(lambda engine: engine.has_unfinished_requests()):
            await asyncio.sleep(0)

        def break_scheduler(engine: LLMEngine) -> None:
            engine.scheduler.schedule = lambda: 1 / 0  # type: ignore[assignment,return-value]

        await llm.call(break_scheduler)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(result) for result in results} == {EngineDeadError}
        assert "ZeroDivisionError" in str(results[0])
        assert llm.errored
        with pytest.raises(EngineDeadError):
            await last(llm.generate([1], GREEDY))

    with_llm(scenario)


def test_a_failed_command_is_the_callers_alone() -> None:
    async def scenario(llm: AsyncLLM) -> None:
        with pytest.raises(ZeroDivisionError):
            await llm.call(lambda engine: 1 / 0)
        assert (await last(llm.generate([4, 5], GREEDY))).finished

    with_llm(scenario)
