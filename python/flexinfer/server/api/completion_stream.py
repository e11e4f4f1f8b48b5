"""CompletionStream: the chunks of one streamed completion."""

from __future__ import annotations

from typing import Any

from flexinfer.outputs import CompletionOutput, RequestOutput
from flexinfer.server.api.completion_call import CompletionCall
from flexinfer.server.api.generate import UsageCounter, tells_usage
from flexinfer.server.api.logprobs import TextPlace
from flexinfer.server.http.streaming import DONE, TextEvents, event
from flexinfer.server.protocol.base import Usage


class CompletionStream:
    """From outputs of the engine to server-sent events, in order."""

    def __init__(self, call: CompletionCall) -> None:
        self._call = call
        self._head = call.answer([]).model_dump(exclude={"usage"})
        self._counter = UsageCounter()
        self._places: dict[int, TextPlace] = {}
        """Of each choice that has begun, where its next token does."""
        self._plain = TextEvents(lambda index, text: self._chunk(_plain_choice(index, text)))
        body = call.body
        self._tells_usage = tells_usage(call.state, body)
        self._tells_running_usage = self._tells_usage and body.wants_running_usage
        self._has_plain = not (
            body.return_token_ids or self._tells_running_usage or body.logprobs is not None
        )

    def add(self, prompt_idx: int, output: RequestOutput) -> str:
        """The events of one output, one per choice."""
        self._counter.add(prompt_idx, output)
        return "".join([self._event(prompt_idx, output, one) for one in output.outputs])

    def finish(self) -> str:
        if not self._tells_usage:
            return DONE
        usage = self._counter.usage().model_dump()
        return event({**self._head, "choices": [], "usage": usage}) + DONE

    def usage(self) -> Usage:
        """Tokens so far."""
        return self._counter.usage()

    def _event(self, prompt_idx: int, output: RequestOutput, one: CompletionOutput) -> str:
        index = self._call.index_of(prompt_idx, one.index)
        if index in self._places and self._has_plain and one.finish_reason is None:
            return self._plain.event(index, one.text)
        choice = self._choice(index, prompt_idx, output, one)
        is_wanted = self._tells_running_usage
        running = self._counter.running(prompt_idx, one.index) if is_wanted else None
        return event(self._chunk(choice, running))

    def _choice(
        self, index: int, prompt_idx: int, output: RequestOutput, one: CompletionOutput
    ) -> dict[str, Any]:
        call, body = self._call, self._call.body
        is_first = index not in self._places
        echo = call.echo_of(prompt_idx)
        place = self._places.setdefault(index, TextPlace(echo.num_hidden))
        shows_prompt = bool(body.echo) and is_first
        choice = _plain_choice(index, (echo.text if shows_prompt else "") + one.text)
        choice["finish_reason"] = one.finish_reason
        choice["stop_reason"] = one.stop_reason
        logprobs = call.logprobs(output, one, place, shows_prompt=shows_prompt)
        if logprobs is not None:
            choice["logprobs"] = logprobs.model_dump()
        if body.return_token_ids:
            choice["token_ids"] = one.token_ids
            if is_first:
                choice["prompt_token_ids"] = output.prompt_token_ids
        return choice

    def _chunk(self, choice: dict[str, Any], running: Usage | None = None) -> dict[str, Any]:
        chunk = {**self._head, "choices": [choice]}
        if self._tells_usage:
            chunk["usage"] = None if running is None else running.model_dump()
        return chunk


def _plain_choice(index: int, text: str) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": None,
        "finish_reason": None,
        "stop_reason": None,
    }
