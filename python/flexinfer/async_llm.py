"""AsyncLLM: the engine for asyncio. Names and arguments are those of vLLM.

One engine thread serves all callers, of any event loop; each caller has a stream of its own.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from concurrent.futures import Future
from itertools import count
from types import TracebackType
from typing import Any, TypeVar

from flexinfer.config import EngineConfig
from flexinfer.engine.beam_search import beam_search_output
from flexinfer.engine.call_arguments import Tokenization, check_call_arguments
from flexinfer.engine.llm_engine import LLMEngine
from flexinfer.engine.thread import EngineThread
from flexinfer.engine_args import EngineArgs
from flexinfer.errors import EngineError, RequestError
from flexinfer.lora.adapters import Adapter, Choice
from flexinfer.lora.request import LoRARequest
from flexinfer.outputs import BeamSearchOutput, RequestOutput, joined
from flexinfer.runtime.json_options import require_choice
from flexinfer.sampling.grammars import COMPILE_TIMEOUT_S, CompiledGrammar
from flexinfer.sampling.params import BeamSearchParams, RequestOutputKind, SamplingParams
from flexinfer.sampling.token_filter import with_bad_words_token_ids
from flexinfer.types import Prompt

Result = TypeVar("Result")
MAX_WAITING = 16


class AsyncLLM:
    """
    async with AsyncLLM("path/to/model") as llm:
        async for output in llm.generate("Hello", SamplingParams(max_tokens=20)):
            print(output.outputs[0].text)
    """

    def __init__(self, model: Any, *, trust_remote_code: bool = False, **settings: Any) -> None:
        """`settings` are those of `EngineArgs`. Loads the model before it returns."""
        self._start(EngineArgs(model, trust_remote_code=trust_remote_code, **settings))

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> AsyncLLM:
        llm = cls.__new__(cls)
        llm._start(engine_args)
        return llm

    def _start(self, config: EngineConfig) -> None:
        engine = LLMEngine.from_engine_args(config)
        self.config = config
        self.tokenizer = engine.tokenizer
        self.inputs = engine.inputs
        self.max_model_len = engine.max_model_len
        self.grammars = engine.grammars
        self.sampling_defaults = engine.sampling_defaults
        self._adapters = engine.adapters
        self._thread = EngineThread(engine)
        self._request_ids = count()
        self._lock = threading.Lock()  # callers may have loops in several threads
        self._mailboxes: dict[asyncio.AbstractEventLoop, _Mailbox] = {}
        # Also at the end of the interpreter, which must not find the thread in a step.
        self._finalizer = weakref.finalize(self, self._thread.stop)

    @property
    def is_running(self) -> bool:
        return self._thread.ended is None

    def join(self) -> None:
        """Return when the engine has stopped: it was shut down, or has failed."""
        self._thread.join()

    @property
    def errored(self) -> bool:
        """Whether the engine has failed for good."""
        ended = self._thread.ended
        return ended is not None and ended.__cause__ is not None

    async def check_health(self) -> None:
        """Raises EngineDeadError if the engine has stopped, whatever the reason."""
        if (ended := self._thread.ended) is not None:
            raise ended

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Those of `generate` without any; see `LLM.get_default_sampling_params`."""
        return self.sampling_defaults.params()

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: Choice = None,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete a prompt: an async iterator of outputs, of the kind `output_kind` asks for.

        `tokenization_kwargs`: as those of `LLM.generate`; `others`: vLLM's further arguments, such
        as trace_headers, where they ask for nothing else (engine/call_arguments.py).

        The request starts when the first output is asked for. A cancelled task, or leaving the
        loop early, aborts it and frees its memory. A caller slower than the engine gets only the
        newest of CUMULATIVE outputs.

        Raises RequestError if the request cannot be served, EngineError if its step failed, and
        EngineDeadError if the engine has stopped.
        """
        if sampling_params is not None and not isinstance(sampling_params, SamplingParams):
            raise RequestError(f"sampling_params must be SamplingParams, got {sampling_params!r}")
        check_call_arguments(others)
        tokenization = Tokenization.of(tokenization_kwargs) if tokenization_kwargs else None
        params = (sampling_params or self.get_default_sampling_params()).clone()
        kind = params.output_kind
        return self._outputs(prompt, params, kind, request_id, priority, lora_request, tokenization)

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        request_id: str | None = None,
        *,
        lora_request: Choice = None,
        priority: int = 0,
    ) -> BeamSearchOutput:
        """The most probable continuations of a prompt. Cancelling it frees its memory."""
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"beam_search takes BeamSearchParams, got {params!r}")
        params = params.clone()
        kind = RequestOutputKind.FINAL_ONLY
        outputs = self._outputs(prompt, params, kind, request_id, priority, lora_request)
        (final,) = [output async for output in outputs]
        return beam_search_output(final, params, self.tokenizer)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End a request, or several; callers get a last output with finish_reason "abort"."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            await asyncio.wrap_future(self._thread.abort(one))

    async def call(self, function: Callable[[LLMEngine], Result]) -> Result:
        """The result of `function(engine)`, called between two steps: stats, budgets, sleep."""
        return await asyncio.wrap_future(self._thread.call(function))

    async def reset_prefix_cache(self) -> int:
        """Forget all recorded prefixes; returns how many tokens they held."""
        return await self.call(lambda engine: engine.reset_prefix_cache())

    async def sleep(self, level: int = 1, mode: str = "keep") -> int:
        """Give all physical KV memory back, as `LLMEngine.sleep`; requests wait for `wake_up`.

        mode: those under way wait, too ("keep"), or get what there is, with finish_reason "abort"
        ("abort", vLLM's default).
        """
        require_choice("mode", mode, ("keep", "abort"))
        if mode == "abort":
            await self.abort(await self.call(lambda engine: list(engine.unfinished_ids())))
        return await self.call(lambda engine: engine.sleep(level))

    async def wake_up(self, tags: Iterable[str] | None = None) -> bool:
        """Undo `sleep`, as `LLM.wake_up`; returns whether it is undone."""
        return await self.call(lambda engine: engine.wake_up(tags))

    async def is_sleeping(self) -> bool:
        return await self.call(lambda engine: engine.is_sleeping())

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter; it stays until `remove_lora`. Raises RequestError."""
        await self.load_adapter(lora_request)
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        """Let no further request choose it; see `LLMEngine.remove_lora`."""
        return await self.call(lambda engine: engine.remove_lora(lora_id))

    async def list_loras(self) -> set[int]:
        """`lora_int_id` of those that are loaded."""
        return await self.call(lambda engine: engine.list_loras())

    def shutdown(self) -> None:
        """End all requests and free everything; waits for the step under way."""
        self._thread.stop()  # until it has returned, the end of the interpreter stops it too
        self._finalizer.detach()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.shutdown)

    def _mailbox(self) -> _Mailbox:
        """Of the running loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            mailbox = self._mailboxes.get(loop)
            if mailbox is None:
                kept = {k: box for k, box in self._mailboxes.items() if not k.is_closed()}
                mailbox = kept[loop] = _Mailbox(loop)
                self._mailboxes = kept
            return mailbox

    async def _outputs(
        self,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams,
        kind: RequestOutputKind,
        request_id: str | None,
        priority: int,
        lora_request: Choice,
        tokenization: Tokenization | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        self._thread.check_process()
        if tokenization is not None:
            prompt = await asyncio.to_thread(tokenization.tokens_of, prompt, self.inputs)
        if request_id is None:
            request_id = f"async-{next(self._request_ids)}"
        stream = _Stream(self._mailbox(), latest_only=kind is RequestOutputKind.CUMULATIVE)
        finished = False
        if isinstance(params, SamplingParams) and params.bad_words:
            params = await asyncio.to_thread(with_bad_words_token_ids, params, self.tokenizer)
        grammar = await self.prepare_grammar(params)
        chosen = lora_request
        if isinstance(chosen, LoRARequest):
            chosen = await self.load_adapter(chosen)
        try:
            await asyncio.wrap_future(
                self._thread.submit(request_id, prompt, params, priority, stream.put, chosen)
            )
            while not finished:
                output = await stream.get()
                finished = output.finished
                yield output
        finally:
            del grammar  # until here the engine found it compiled
            if not finished:
                self._thread.drop(request_id, stream.put)

    async def load_adapter(self, lora_request: LoRARequest) -> Adapter:
        """The loaded adapter. Its files are read in no thread that others wait for; `generate`
        does so itself, and takes what this returns in the place of the request. Raises
        RequestError."""
        self._thread.check_process()
        found = self._adapters.find(lora_request)
        if found is not None:
            return found
        try:
            future = self._adapters.prepare(lora_request)
        except RuntimeError:  # the engine is closed, and says so itself
            return await self.call(lambda engine: engine.adapters.add(lora_request))
        # Others may wait for the same files: who goes does not take them along.
        adapter = await asyncio.shield(asyncio.wrap_future(future))
        return await self.call(lambda engine: engine.adapters.load(adapter))

    async def prepare_grammar(
        self,
        params: SamplingParams | BeamSearchParams,
        begun: Callable[[Future[CompiledGrammar]], None] | None = None,
    ) -> CompiledGrammar | None:
        """Compile what a request needs, in no thread that others wait for; `generate` does so
        itself, and finds it as long as the result is kept. `begun` is told of the thread's work,
        which a caller that goes away does not end. Raises RequestError."""
        if not isinstance(params, SamplingParams) or params.structured_outputs is None:
            return None
        self._thread.check_process()
        try:
            future = self.grammars.prepare(params.structured_outputs)
        except RuntimeError:  # the engine is closed, and says so itself
            return None
        if begun is not None:
            begun(future)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), COMPILE_TIMEOUT_S)
        except TimeoutError:
            raise RequestError(
                f"{params.structured_outputs.kind} was not compiled within {COMPILE_TIMEOUT_S:g} s"
            ) from None


AsyncLLMEngine = AsyncLLM


class _Mailbox:
    """Outputs on their way from the engine's thread to one event loop.

    The loop is woken once for all that comes before it gets to look: mostly once per step.
    Waking it is a system call: the engine thread gives the GIL away in the middle of its step.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._lock = threading.Lock()
        self._items: list[tuple[_Stream, RequestOutput | EngineError]] = []

    def put(self, stream: _Stream, item: RequestOutput | EngineError) -> None:
        """From any thread. Raises RuntimeError if the loop is closed."""
        with self._lock:
            self._items.append((stream, item))
            is_woken = len(self._items) > 1
        # A loop that was closed after it was woken takes nothing: that must not go unnoticed.
        if not is_woken or self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._hand_out)

    def _hand_out(self) -> None:
        with self._lock:
            items, self._items = self._items, []
        for stream, item in items:
            stream.append(item)


class _Stream:
    """Outputs of one request, for one caller.

    A caller that is slow gets the newest of CUMULATIVE outputs, and DELTA ones joined: never more
    than `MAX_WAITING` wait here.
    """

    def __init__(self, mailbox: _Mailbox, *, latest_only: bool) -> None:
        self._mailbox = mailbox
        self._items: deque[RequestOutput | EngineError] = deque(maxlen=1 if latest_only else None)
        self._loop = mailbox.loop
        self._reader: asyncio.Future[None] | None = None  # set while one waits

    def put(self, item: RequestOutput | EngineError) -> None:
        """From any thread. Raises RuntimeError if the loop is closed."""
        self._mailbox.put(self, item)

    async def get(self) -> RequestOutput:
        while not self._items:
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        item = self._items.popleft()
        if isinstance(item, EngineError):
            raise item
        return item

    def append(self, item: RequestOutput | EngineError) -> None:
        """In the loop."""
        last = self._items[-1] if len(self._items) >= MAX_WAITING else None
        if isinstance(last, RequestOutput) and isinstance(item, RequestOutput):
            self._items[-1] = joined(last, item)
        else:
            self._items.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
