"""EngineThread: an LLMEngine that runs in a thread of its own.

A caller hands over a function, which the thread calls between two
steps. With nothing to compute the thread sleeps in its queue: no polling. A while after the last
step what malloc keeps free for the next one goes back to the system.

Thread-safety: all methods may be called from any thread. Callbacks are called in the engine's
thread and must not block.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from flexinfer.engine.llm_engine import LLMEngine
from flexinfer.errors import EngineDeadError, EngineError
from flexinfer.lora.adapters import Choice
from flexinfer.outputs import RequestOutput
from flexinfer.runtime.malloc import return_freed_memory
from flexinfer.runtime.openmp import release_threads
from flexinfer.runtime.panics import panics_as_errors
from flexinfer.runtime.torch_settings import bound_primitive_caches
from flexinfer.sampling.params import BeamSearchParams, SamplingParams
from flexinfer.types import Prompt

logger = logging.getLogger(__name__)

THREAD_NAME = "flexinfer-engine"
"""Also for `top -H` and /proc, which keep 15 characters of it."""
IDLE_S = 2.0
"""How long memory of steps is kept for the next one. To fault 30 MiB in again takes 21 ms."""

Result = TypeVar("Result")
Callback = Callable[[RequestOutput | EngineError], None]
"""Takes the outputs of one request: the last is `finished`, or an error."""
Command = tuple[Future[Any], Callable[[LLMEngine], Any]]


class EngineThread:
    """
    Invariants:
    1. Only the thread touches the engine and `_callbacks`.
    2. Each callback gets a last item: its request's end, or an error.
    3. Every future gets a result or an error; after `stop` none is accepted.
    """

    def __init__(self, engine: LLMEngine) -> None:
        """The calling thread gives the engine away, and the OpenMP threads that loaded its model:
        with two pools the engine's would sleep between operators (a quarter of decode, 2 cores)."""
        release_threads()
        self._engine = engine
        self._callbacks: dict[str, Callback] = {}
        self._commands: SimpleQueue[Command | None] = SimpleQueue()
        self._return_at_s: float | None = None  # when memory goes back; None: it has gone
        self._lock = threading.Lock()  # orders the last command before the end
        self._ended: EngineDeadError | None = None
        self._pid = os.getpid()
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=THREAD_NAME, daemon=True)
        self._thread.start()

    @property
    def ended(self) -> EngineDeadError | None:
        """Why it serves no more; None while it does."""
        return self._inherited() or self._ended

    def check_process(self) -> None:
        """Raises EngineDeadError after a fork: the child has the engine, and none of its threads
        that would answer."""
        inherited = self._inherited()
        if inherited is not None:
            raise inherited

    def call(self, function: Callable[[LLMEngine], Result]) -> Future[Result]:
        """Have the thread call `function(engine)` between two steps.

        Raises EngineDeadError if the thread has ended.
        """
        future: Future[Result] = Future()
        self._post((future, function))
        return future

    def submit(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | None,
        priority: int,
        callback: Callback,
        lora_request: Choice = None,
    ) -> Future[None]:
        """Queue a request. The future raises RequestError if it cannot be served."""

        def add(engine: LLMEngine) -> None:
            engine.add_request(request_id, prompt, params, priority, lora_request)
            self._callbacks[request_id] = callback

        return self.call(add)

    def abort(self, request_id: str) -> Future[None]:
        """End a request; its callback gets what it has. Unknown ids are passed over."""
        return self.call(lambda engine: self._deliver(engine.abort_request(request_id)))

    def drop(self, request_id: str, callback: Callback) -> None:
        """The caller of this callback has gone: free its request, if it is still running."""

        def forget(engine: LLMEngine) -> None:
            if self._callbacks.get(request_id) == callback:  # else the id is another caller's
                del self._callbacks[request_id]
                engine.abort_request(request_id)

        with suppress(EngineDeadError):  # it has freed everything
            self.call(forget)

    def stop(self) -> None:
        """End all requests and the engine; returns when it has. May be called again. An interrupt
        is raised only then: an interpreter that ends while the thread computes aborts."""
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                self._stop()
                break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _stop(self) -> None:
        with suppress(EngineDeadError):
            self._post(None)
        if threading.current_thread() is not self._thread:
            self.join()

    def join(self) -> None:
        """Return when the thread has ended; at once in a forked child, which has none."""
        if self._inherited() is None:
            self._has_ended.wait()  # up to Python 3.12 an interrupted join() takes it for ended
            self._thread.join()

    def _inherited(self) -> EngineDeadError | None:
        if self._pid == os.getpid():
            return None
        return EngineDeadError(
            f"the engine was made in another process ({self._pid}), and threads do not survive "
            "fork(): start processes by spawn, and open an engine there"
        )

    def _post(self, command: Command | None) -> None:
        self.check_process()  # before the lock, which may have been held at the fork
        with self._lock:
            if self._ended is not None:
                raise _again(self._ended)
            self._commands.put(command)

    # In the thread.

    def _serve(self) -> None:
        with suppress(OSError):  # no /proc: then tools that list threads show no name
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(THREAD_NAME)
        end = EngineDeadError("the engine was shut down")
        try:
            bound_primitive_caches()
            self._engine.on_rank_failure(lambda: self._commands.put((Future(), _nothing)))
            self._engine.warm_up()
            while self._run_commands():
                self._step()
        except BaseException as error:
            logger.exception("the engine has failed")
            end = EngineDeadError(f"the engine has failed: {type(error).__name__}: {error}")
            end.__cause__ = error
        try:
            self._end(end)
        finally:
            self._has_ended.set()

    def _run_commands(self) -> bool:
        """Run what is in the queue; wait there if there is nothing else to do. False: stop."""
        engine = self._engine
        while True:
            is_idle = engine.is_sleeping() or not engine.has_unfinished_requests()
            try:
                command = self._wait_for_command() if is_idle else self._commands.get_nowait()
            except Empty:
                return True
            if command is None:
                return False
            self._run(*command)
            engine.check_ranks()

    def _wait_for_command(self) -> Command | None:
        """IDLE_S after the last step memory goes back, however often others ask meanwhile."""
        if self._return_at_s is not None:
            with suppress(Empty):
                return self._commands.get(timeout=max(0.0, self._return_at_s - time.monotonic()))
            return_freed_memory()
            self._return_at_s = None
        return self._commands.get()

    def _step(self) -> None:
        """One step. One that fails ends its own requests; if it ended none, it would fail for
        ever, and the error goes on."""
        try:
            with panics_as_errors:
                outputs = self._engine.step()
        except EngineDeadError:
            raise
        except Exception as error:
            ended = [i for i in self._callbacks if i not in self._engine.unfinished_ids()]
            if not ended:
                raise
            logger.warning("a step has failed, %d requests with it", len(ended), exc_info=True)
            for request_id in ended:
                self._tell(request_id, _step_error(request_id, error), last=True)
        else:
            self._deliver(outputs)
        self._return_at_s = time.monotonic() + IDLE_S

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self._tell(output.request_id, output, last=output.finished)

    def _tell(self, request_id: str, item: RequestOutput | EngineError, *, last: bool) -> None:
        """A callback that fails (its event loop is closed) is a caller that has gone."""
        callback = self._callbacks.get(request_id)
        if callback is None:
            return
        try:
            callback(item)
        except Exception as error:  # of the taker's, and no harm to other requests
            is_fault = not isinstance(error, RuntimeError)  # which a loop that is closed raises
            logger.warning(
                "the output of request %r finds no taker: %s", request_id, error, exc_info=is_fault
            )
            self._engine.abort_request(request_id)
            last = True
        if last:
            del self._callbacks[request_id]

    def _run(self, future: Future[Any], function: Callable[[LLMEngine], Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            with panics_as_errors:
                result = function(self._engine)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    def _end(self, end: EngineDeadError) -> None:
        """Tell every caller, whatever else fails; free everything."""
        with self._lock:
            self._ended = end
        try:
            self._engine.close()
        except Exception:
            logger.exception("the engine could not be closed")
        for request_id in list(self._callbacks):
            self._tell(request_id, _again(end), last=True)
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None and command[0].set_running_or_notify_cancel():
                command[0].set_exception(_again(end))


def _nothing(engine: LLMEngine) -> None:
    """Wakes the thread, which then finds out what has happened."""


def _again(end: EngineDeadError) -> EngineDeadError:
    """The same error for one more caller: an exception object collects a traceback."""
    error = EngineDeadError(str(end))
    error.__cause__ = end.__cause__
    return error


def _step_error(request_id: str, cause: Exception) -> EngineError:
    error = EngineError(f"the step of request {request_id!r} failed: {cause}")
    error.__cause__ = cause
    return error
