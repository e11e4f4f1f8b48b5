"""ChatStream: the chunks of one streamed chat completion."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from flexinfer.outputs import CompletionOutput, RequestOutput
from flexinfer.server.api.chat_call import ChatCall
from flexinfer.server.api.generate import UsageCounter
from flexinfer.server.api.logprobs import chat_logprobs
from flexinfer.server.api.tools import Parsed, ToolParser, finish_reason
from flexinfer.server.http.streaming import DONE, TextEvents, event
from flexinfer.server.protocol.base import Usage
from flexinfer.server.protocol.chat import AnswerMessage, ToolCall


@dataclass
class Progress:
    """What one choice has said so far."""

    parser: ToolParser | None
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


class ChatStream:
    """From outputs of the engine to server-sent events, in order."""

    def __init__(self, call: ChatCall) -> None:
        self._call = call
        self._head = {
            "id": call.job.request_id,
            "object": "chat.completion.chunk",
            "created": call.created,
            "model": call.model,
            "system_fingerprint": call.state.fingerprint,
        }
        if call.conversation is not None:
            self._head["conversation"] = call.conversation.id
        self._counter = UsageCounter()
        self._choices: dict[int, Progress] = {}
        self._plain = TextEvents(lambda index, text: self._body(index, {"content": text}))
        body = call.body
        self._has_plain = not (
            body.return_token_ids or body.wants_running_usage or call.num_top_logprobs is not None
        )

    def add(self, output: RequestOutput) -> str:
        """The events of one output; none if it shows nothing new."""
        self._counter.add(0, output)
        return "".join([text for one in output.outputs for text in self._events(one)])

    def deltas(self, output: RequestOutput) -> Iterator[str]:
        """Only the new text of each choice, for another shape of stream."""
        self._counter.add(0, output)
        for one in output.outputs:
            yield self._read(one)[1].content

    def finish(self) -> str:
        if not self._call.body.wants_usage:
            return DONE
        usage = self._counter.usage().model_dump()
        return event({**self._head, "choices": [], "usage": usage}) + DONE

    def message(self, index: int) -> AnswerMessage:
        """A choice as a whole message."""
        progress = self._choices[index]
        return AnswerMessage(content=progress.content or None, tool_calls=progress.calls or None)

    def token_ids(self, index: int) -> list[int]:
        return self._choices[index].token_ids

    def usage(self) -> Usage:
        """Tokens so far."""
        return self._counter.usage()

    def _events(self, one: CompletionOutput) -> Iterator[str]:
        if one.index not in self._choices:
            yield self._role_chunk(one.index)
        progress, parsed = self._read(one)
        if self._has_plain and one.finish_reason is None and not parsed.calls:
            if parsed.content:
                yield self._plain.event(one.index, parsed.content)
        else:
            yield from self._chunks(progress, parsed, one)

    def _role_chunk(self, index: int) -> str:
        """Before any token: running usage counts none of this choice yet."""
        body = self._body(index, {"role": "assistant", "content": ""})
        if self._call.body.wants_running_usage:
            usage = self._counter.usage(with_last=False)
            body["usage"] = usage.model_dump()
        if self._call.body.return_token_ids:
            body["prompt_token_ids"] = self._call.job.prompts[0]["prompt_token_ids"]
        return event(body)

    def _read(self, one: CompletionOutput) -> tuple[Progress, Parsed]:
        """Take in what is new of a choice."""
        progress = self._choices.get(one.index)
        if progress is None:
            progress = self._choices[one.index] = Progress(self._call.tools.parser())
        parsed = _parse(progress.parser, one)
        progress.token_ids += one.token_ids
        progress.content += parsed.content
        progress.calls += parsed.calls
        return progress, parsed

    def _chunks(self, progress: Progress, parsed: Parsed, one: CompletionOutput) -> Iterator[str]:
        """What is new, and the end. Logprobs stand with the text of their tokens, or alone."""
        num_top = self._call.num_top_logprobs
        logprobs = None
        if num_top is not None and one.token_ids:
            logprobs = chat_logprobs(one, num_top, self._call.state.token_bytes).model_dump()
        extra: dict[str, Any] = {"logprobs": logprobs}
        if self._call.body.return_token_ids:
            extra["token_ids"] = one.token_ids
        if parsed.content or logprobs is not None:
            yield self._chunk(one.index, {"content": parsed.content}, **extra)
        num_before = len(progress.calls) - len(parsed.calls)
        for index, call in enumerate(parsed.calls, start=num_before):
            yield self._chunk(one.index, {"tool_calls": [{"index": index, **call.model_dump()}]})
        if one.finish_reason is not None:
            reason = finish_reason(self._call.tools, one, bool(progress.calls))
            yield self._chunk(one.index, {}, finish_reason=reason, stop_reason=one.stop_reason)

    def _chunk(self, index: int, delta: dict[str, Any], **extra: Any) -> str:
        return event(self._body(index, delta, **extra))

    def _body(self, index: int, delta: dict[str, Any], **extra: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **extra}
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._call.body.wants_usage:
            wanted = self._call.body.wants_running_usage
            chunk["usage"] = self._counter.usage().model_dump() if wanted else None
        return chunk


def _parse(parser: ToolParser | None, one: CompletionOutput) -> Parsed:
    if parser is None:
        return Parsed(one.text)
    parsed = parser.feed(one.text)
    if one.finish_reason is None:
        return parsed
    tail = parser.finish()
    return Parsed(parsed.content + tail.content, parsed.calls + tail.calls)
