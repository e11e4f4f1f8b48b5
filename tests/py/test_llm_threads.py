"""LLM and AsyncLLM called by several threads: each gets what it would get alone."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer import LLM, AsyncLLM, EngineError, SamplingParams
from flexinfer.engine.llm_engine import LLMEngine
from flexinfer.models import loading
from flexinfer.outputs import RequestOutput

GREEDY = SamplingParams(temperature=0, max_tokens=16)
PROMPTS = ["hello", "a b c", "world of", "one two three", "x", "yes and no"]


def streamed(llm: LLM, prompt: str) -> str:
    return "".join(output.outputs[0].text for output in llm.stream(prompt, GREEDY))


def said(llm: LLM, prompt: str) -> str:
    chat = [{"role": "user", "content": prompt}]
    (answer,) = llm.chat(chat, GREEDY, use_tqdm=False)
    return answer.outputs[0].text


def completed(llm: LLM, prompt: str) -> str:
    (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    return output.outputs[0].text


@pytest.mark.parametrize("call", [completed, streamed, said])
def test_threads_that_share_an_llm_get_their_own_texts(
    llm: LLM, call: Callable[[LLM, str], str]
) -> None:
    """They got one another's, or errors: each stepped the engine while others did."""
    alone = [call(llm, prompt) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(call, [llm] * len(PROMPTS), PROMPTS)) == alone
    assert not llm.llm_engine.has_unfinished_requests()


def test_a_stream_that_waits_for_its_reader_holds_no_other_thread_up(llm: LLM) -> None:
    alone = streamed(llm, "hello")
    stream = llm.stream("hello", GREEDY)
    text = next(stream).outputs[0].text
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(completed, llm, "hello").result() == alone
    assert text + "".join(output.outputs[0].text for output in stream) == alone


def test_only_one_thread_at_a_time_is_in_the_engine(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = threading.Lock()
    step = LLMEngine.step

    def watched(engine: LLMEngine) -> list[RequestOutput]:
        assert inside.acquire(blocking=False), "two threads step at once"
        try:
            return step(engine)
        finally:
            inside.release()

    monkeypatch.setattr(LLMEngine, "step", watched)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(completed, [llm] * 4, PROMPTS[:4]))


def test_a_stream_whose_request_ended_with_anothers_step_says_so(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = stream_ended_by_anothers_step(llm, monkeypatch)
    with pytest.raises(EngineError, match="1 of 1 requests were ended by another call"):
        list(stream)


def test_a_request_that_has_ended_is_not_waited_for_while_others_go_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was for as long as others kept the engine busy."""
    stream = stream_ended_by_anothers_step(llm, monkeypatch)
    with closing(llm.stream("hello", GREEDY)) as other:
        next(other)
        with pytest.raises(EngineError, match="1 of 1 requests were ended by another call"):
            list(stream)
        assert llm.llm_engine.get_num_unfinished_requests() == 1


@pytest.mark.parametrize("place", ["_steps.execute", "_outputs"])
def test_a_stream_that_is_collected_within_a_step_harms_no_other_request(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """It was aborted there and then, and the call that made the step got a KeyError, or that its
    vTensor had been released."""
    alone = completed(llm, "hello")
    stream = llm.stream("world", GREEDY)
    next(stream)
    left: list[object] = [stream]
    left.append(left)
    path, _, name = place.rpartition(".")
    part = getattr(llm.llm_engine, path) if path else llm.llm_engine
    function = getattr(part, name)

    def collecting(*args: object, **settings: object) -> object:
        result = function(*args, **settings)
        gc.collect()
        return result

    monkeypatch.setattr(part, name, collecting)
    del stream, left
    assert completed(llm, "hello") == alone
    assert not llm.llm_engine.has_unfinished_requests()
    assert not llm._set_aside


@pytest.mark.parametrize("name", ["add_request", "_compute"])
def test_an_interrupt_ends_the_requests_of_the_call_that_it_came_to_and_no_others(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It broke the step off: the requests of other threads ended with it, or waited for ever."""
    alone = streamed(llm, "hello")
    stream = llm.stream("hello", GREEDY)
    text = next(stream).outputs[0].text
    engine = llm.llm_engine
    function = getattr(engine, name)

    def interrupted(*args: object, **settings: object) -> object:
        result = function(*args, **settings)
        signal.raise_signal(signal.SIGINT)
        return result

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(engine, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                completed(llm, "world")
    finally:
        signal.signal(signal.SIGINT, before)
    assert engine.get_num_unfinished_requests() == 1
    assert text + "".join(output.outputs[0].text for output in stream) == alone
    assert not llm._set_aside


def test_llms_that_threads_open_at_once_are_loaded_one_after_the_other(
    llm: LLM, model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' functions stayed changed: no checkpoint with a tied head was complete then."""
    inside = threading.Lock()
    place = loading._place

    def watched(*args: Any) -> Any:
        assert inside.acquire(blocking=False), "two threads load at once"
        try:
            return place(*args)
        finally:
            inside.release()

    def opened(path: str) -> str:
        with LLM(path, kv_cache_memory_bytes=16 << 20) as own:
            return completed(own, "hello")

    monkeypatch.setattr(loading, "_place", watched)
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(opened, [model_path] * 3)) == [completed(llm, "hello")] * 3


def stream_ended_by_anothers_step(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RequestOutput]:
    def broken_step(*_: object, **__: object) -> None:
        raise RuntimeError("the device is on fire")

    stream = llm.stream("hello", GREEDY)
    next(stream)
    with monkeypatch.context() as broken:
        broken.setattr(llm.llm_engine, "_compute", broken_step)
        with pytest.raises(RuntimeError, match="the device is on fire"):
            completed(llm, "world")
    return stream


def test_an_async_llm_serves_loops_of_several_threads(llm: LLM, model_path: str) -> None:
    alone = [completed(llm, prompt) for prompt in PROMPTS]
    shared = AsyncLLM(model_path, kv_cache_memory_bytes=16 << 20)
    try:

        async def complete(prompt: str) -> str:
            return [o async for o in shared.generate(prompt, GREEDY)][-1].outputs[0].text

        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            assert list(pool.map(asyncio.run, map(complete, PROMPTS))) == alone
    finally:
        shared.shutdown()


def running(llm: LLM, num_tokens: int = 200) -> tuple[ThreadPoolExecutor, Any]:
    """A thread with a call that has begun, and what it will give."""
    pool = ThreadPoolExecutor(1)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    future = pool.submit(llm.generate, "hello", params, use_tqdm=False)
    while not llm.llm_engine.has_unfinished_requests():
        assert not future.done() or future.result()
    return pool, future


def test_sleep_waits_for_the_calls_of_other_threads(llm: LLM) -> None:
    """They ended with an error."""
    pool, future = running(llm)
    with pool:
        assert llm.sleep() > 0
        (output,) = future.result()
    assert len(output.outputs[0].token_ids) == 200
    with pytest.raises(ValueError, match=r"the engine is asleep; call wake_up\(\) first"):
        completed(llm, "hello")
    assert llm.wake_up()
    assert completed(llm, "hello")


def test_sleep_may_end_the_calls_of_other_threads(llm: LLM) -> None:
    pool, future = running(llm)
    with pool:
        llm.sleep(mode="abort")
        (output,) = future.result()
    llm.wake_up()
    assert output.outputs[0].finish_reason == "abort"
    assert len(output.outputs[0].token_ids) < 200


def test_a_call_that_begins_while_another_thread_waits_to_sleep_holds_it_up_no_longer(
    llm: LLM,
) -> None:
    pool, future = running(llm)
    with pool, ThreadPoolExecutor(2) as others:
        asleep = others.submit(llm.sleep)
        while not llm._calls._num_wanting_none:
            assert not asleep.done() or asleep.result()
        late = others.submit(completed, llm, "hello")
        assert asleep.result() > 0
        assert future.done()
        with pytest.raises(ValueError, match="the engine is asleep"):
            late.result()
    llm.wake_up()


def test_a_stream_that_waits_for_its_reader_is_not_waited_for(llm: LLM) -> None:
    stream = llm.stream("hello", GREEDY)
    next(stream)
    llm.sleep()
    with pytest.raises(ValueError, match="the engine is asleep"):
        next(stream)
    llm.wake_up()


def test_another_way_to_sleep_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="mode must be one of 'wait', 'abort', got 'keep'"):
        llm.sleep(mode="keep")
