"""The thread of an AsyncLLM: it idles, sleeps, wakes loops once, and ends when nobody needs it."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import signal
import time
from queue import SimpleQueue
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer import AsyncLLM, EngineDeadError, EngineError, LLMEngine
from flexinfer.async_llm import _Mailbox, _Stream
from flexinfer.engine import thread
from helpers.async_kit import (
    GREEDY,
    LONG,
    SETTINGS,
    check_nothing_is_left,
    last,
    until_idle,
    with_llm,
)
from helpers.tiny_models import make_model, reference


@pytest.fixture(scope="module", autouse=True)
def _known_references() -> None:
    """Asked for before any engine's thread uses the same model."""
    reference("llama", (4, 5), 12)


def test_shutdown_ends_callers_with_a_typed_error() -> None:
    async def scenario(llm: AsyncLLM) -> None:
        outputs = llm.generate([1, 2, 3], LONG)
        await anext(outputs)
        await asyncio.to_thread(llm.shutdown)
        with pytest.raises(EngineDeadError, match="shut down"):
            await last(outputs)
        assert not llm.errored
        llm.shutdown()
        with pytest.raises(EngineDeadError):
            await llm.call(lambda engine: None)

    with_llm(scenario)


def test_an_interrupt_of_a_shutdown_is_raised_when_the_thread_has_ended() -> None:
    """An interpreter that ends while the thread computes aborts."""
    llm = AsyncLLM(make_model("llama"), **SETTINGS)
    llm._thread.call(lambda engine: time.sleep(0.6))
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1, 0.2)
        with pytest.raises(KeyboardInterrupt):
            llm.shutdown()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not llm.is_running
    llm.shutdown()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_told_to_open_an_engine_of_its_own() -> None:
    """It has none of the parent's threads: it would wait for ever."""
    llm = AsyncLLM(make_model("llama"), **SETTINGS)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, _error_of(llm).encode())
        finally:
            os._exit(0)
    try:
        assert select.select([reader], [], [], 60)[0], "the child waits"
        said = os.read(reader, 4096).decode()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)
    assert said.startswith("EngineDeadError False the engine was made in another process")
    assert f"({os.getpid()})" in said
    assert "by spawn" in said
    llm.shutdown()


def _error_of(llm: AsyncLLM) -> str:
    """Of a request; after it `shutdown` returns."""
    try:
        asyncio.run(last(llm.generate([1, 2, 3], GREEDY)))
    except EngineError as error:
        llm.shutdown()
        return f"{type(error).__name__} {llm.is_running} {error}"
    return "no error"


def test_an_idle_engine_uses_no_time() -> None:
    async def scenario(llm: AsyncLLM) -> None:
        await last(llm.generate([1, 2, 3], GREEDY))

        def thread_time(_: LLMEngine) -> float:
            return time.clock_gettime(time.CLOCK_THREAD_CPUTIME_ID)

        before = await llm.call(thread_time)
        await asyncio.sleep(0.5)
        assert await llm.call(thread_time) - before < 0.05

    with_llm(scenario)


@pytest.fixture
def returned(monkeypatch: pytest.MonkeyPatch) -> SimpleQueue[None]:
    """Something each time that memory goes back, 0.2 s after the last step."""
    times: SimpleQueue[None] = SimpleQueue()
    monkeypatch.setattr(thread, "IDLE_S", 0.2)
    monkeypatch.setattr(thread, "return_freed_memory", lambda: times.put(None))
    return times


def test_memory_of_steps_goes_back_once_after_a_while_without_work(
    returned: SimpleQueue[None],
) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        assert returned.empty()  # nothing was computed
        for _ in range(2):
            await last(llm.generate([1, 2, 3], GREEDY))
            await asyncio.to_thread(returned.get, timeout=60)
            await llm.call(lambda engine: None)  # wakes the thread, and is no step
            await asyncio.sleep(0.5)
            assert returned.empty()

    with_llm(scenario)


def test_calls_that_are_no_steps_do_not_put_off_the_return_of_memory(
    returned: SimpleQueue[None],
) -> None:
    """As of who looks at its numbers more often than it would have to be idle."""

    async def scenario(llm: AsyncLLM) -> None:
        await last(llm.generate([1, 2, 3], GREEDY))
        until_s = time.monotonic() + 60
        while returned.empty():
            assert time.monotonic() < until_s
            await llm.call(lambda engine: engine.stats())
            await asyncio.sleep(0.02)

    with_llm(scenario)


def test_a_caller_whose_loop_is_gone_is_forgotten() -> None:
    llm = AsyncLLM(make_model("llama"), **SETTINGS)

    async def leave() -> Any:
        outputs = llm.generate([1, 2, 3], LONG)
        await anext(outputs)
        return outputs

    loop = asyncio.new_event_loop()
    outputs = loop.run_until_complete(leave())
    loop.close()

    async def later() -> None:
        final = await last(llm.generate([4, 5], GREEDY))
        assert final.outputs[0].token_ids == reference("llama", (4, 5), 12)
        await until_idle(llm)
        await llm.call(check_nothing_is_left)

    asyncio.run(later())
    llm.shutdown()
    del outputs


def test_a_forgotten_engine_ends_its_thread() -> None:
    llm = AsyncLLM(make_model("llama"), **SETTINGS)
    thread = llm._thread._thread
    del llm
    gc.collect()
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_a_sleeping_engine_goes_on_when_it_wakes() -> None:
    async def scenario(llm: AsyncLLM) -> None:
        outputs = llm.generate([4, 5], GREEDY)
        await anext(outputs)
        await llm.sleep()
        assert await llm.is_sleeping()
        tasks = [asyncio.create_task(last(o)) for o in (outputs, llm.generate([4, 5], GREEDY))]
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in tasks)
        await llm.wake_up()
        for task in tasks:
            assert (await task).outputs[0].token_ids == reference("llama", (4, 5), 12)

    with_llm(scenario)


def test_outputs_that_come_together_wake_the_loop_once() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        wakings = []
        call_soon = loop.call_soon_threadsafe

        def counted(*args: Any, **options: Any) -> Any:
            wakings.append(args)
            return call_soon(*args, **options)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
        mailbox = _Mailbox(loop)
        streams = [_Stream(mailbox, latest_only=False) for _ in range(8)]
        errors = [EngineError(str(index)) for index in range(8)]
        for _ in range(2):
            for stream, error in zip(streams, errors, strict=True):
                stream.put(error)
            for stream, error in zip(streams, errors, strict=True):
                with pytest.raises(EngineError) as caught:
                    await stream.get()
                assert caught.value is error
        assert len(wakings) == 2

    asyncio.run(main())


def test_a_loop_that_was_closed_after_it_was_woken_takes_nothing() -> None:
    async def make() -> _Stream:
        stream = _Stream(_Mailbox(asyncio.get_running_loop()), latest_only=False)
        asyncio.get_running_loop().stop()
        return stream

    loop = asyncio.new_event_loop()
    task = loop.create_task(make())
    loop.run_forever()
    stream = task.result()
    stream.put(EngineError("woken"))
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        stream.put(EngineError("closed"))
