"""Answer: one request at the engine, streamed, and stopped by Ctrl-C without harm."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexinfer.engine import LLMEngine
    from flexinfer.outputs import RequestMetrics
    from flexinfer.sampling_params import SamplingParams


class Interrupt:
    """While open, Ctrl-C sets a flag between two steps instead of breaking one off."""

    def __init__(self) -> None:
        self.wanted = False
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.wanted = True


class Answer:
    """What the model says to a prompt, and how it went."""

    def __init__(
        self, engine: LLMEngine, request_id: str, prompt: list[int], params: SamplingParams
    ) -> None:
        """Raises RequestError, before any work, if the prompt can not be served."""
        self._engine = engine
        self._request_id = request_id
        self.text = ""
        self.token_ids: list[int] = []
        self.num_cached_tokens = 0
        self.stop_reason: int | str | None = None
        self.finish_reason: str | None = None
        self._metrics: RequestMetrics | None = None
        self._end_time = 0.0
        engine.add_request(request_id, {"prompt_token_ids": prompt}, params)

    def pieces(self, interrupt: Interrupt) -> Iterator[str]:
        """The text as it comes. After an interrupt the request ends and what is said stays."""
        while self.finish_reason is None:
            if interrupt.wanted:
                self._engine.abort_request(self._request_id)
                self.finish_reason = "abort"
                break
            for output in self._engine.step():
                answer = output.outputs[0]
                piece = answer.text[len(self.text) :]
                self.text, self.token_ids = answer.text, list(answer.token_ids)
                self.num_cached_tokens = output.num_cached_tokens or 0
                self.stop_reason, self._metrics = answer.stop_reason, output.metrics
                self.finish_reason = answer.finish_reason
                if piece:
                    yield piece
        self._end_time = time.monotonic()

    @property
    def chunks_aliased(self) -> int:
        return self._metrics.chunks_aliased if self._metrics else 0

    @property
    def chunks_copied(self) -> int:
        return self._metrics.chunks_copied if self._metrics else 0

    @property
    def time_to_first_token_s(self) -> float | None:
        return self._metrics.time_to_first_token_s if self._metrics else None

    @property
    def tokens_per_s(self) -> float:
        """After the first token; 0 if there was only one."""
        if self._metrics is None or self._metrics.first_token_time is None:
            return 0.0
        seconds = self._end_time - self._metrics.first_token_time
        return (len(self.token_ids) - 1) / seconds if seconds > 0 else 0.0

    @property
    def ending(self) -> str:
        """What is to be said of an answer that did not end by itself."""
        endings = {
            "length": "; cut at the limit of tokens",
            "abort": "; stopped",
            "error": f"; failed: {self.stop_reason}",
        }
        return endings.get(self.finish_reason or "", "")
