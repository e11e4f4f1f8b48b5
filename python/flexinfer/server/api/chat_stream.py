"""ChatStream: the chunks of one streamed chat completion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

from flexinfer.outputs import CompletionOutput, RequestOutput
from flexinfer.server.api.chat_call import ChatCall, num_reasoning
from flexinfer.server.api.generate import UsageCounter, tells_usage
from flexinfer.server.api.logprobs import chat_logprobs
from flexinfer.server.api.saying import Saying
from flexinfer.server.api.tools import finish_reason
from flexinfer.server.http.streaming import DONE, TextEvents, event
from flexinfer.server.parsing.pieces import CallStart, Content, Piece, Reasoning
from flexinfer.server.protocol.base import Usage


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
        self._choices: dict[int, Saying] = {}
        self._plain = TextEvents(lambda index, text: self._body(index, {"content": text}))
        body = call.body
        self._tells_usage = tells_usage(call.state, body)
        self._tells_running_usage = self._tells_usage and body.wants_running_usage
        self._has_plain = not (
            body.return_token_ids or self._tells_running_usage or call.num_top_logprobs is not None
        )

    def add(self, output: RequestOutput) -> str:
        """The events of one output; none if it shows nothing new."""
        self._counter.add(0, output)
        return "".join([text for one in output.outputs for text in self._events(one)])

    def pieces(self, output: RequestOutput) -> list[Piece]:
        """What is new of the only choice, for another shape of stream."""
        self._counter.add(0, output)
        return [piece for one in output.outputs for piece in self._read(one)[1]]

    def finish(self) -> str:
        if not self._tells_usage:
            return DONE
        usage = self.usage().model_dump()
        return event({**self._head, "choices": [], "usage": usage}) + DONE

    def said(self, index: int = 0) -> Saying:
        """A choice as a whole."""
        return self._choices[index]

    def usage(self) -> Usage:
        """Tokens so far."""
        return self._counter.usage(num_reasoning(self._call, list(self._choices.values())))

    def _events(self, one: CompletionOutput) -> Iterator[str]:
        if one.index not in self._choices:
            yield self._role_chunk(one.index)
        said, pieces = self._read(one)
        if self._has_plain and one.finish_reason is None and _is_plain(pieces):
            for piece in pieces:
                yield self._plain.event(one.index, piece.text)
        else:
            yield from self._chunks(said, pieces, one)

    def _role_chunk(self, index: int) -> str:
        """Before any token: running usage counts none of this choice yet."""
        body = self._body(index, {"role": "assistant", "content": ""})
        if self._tells_running_usage:
            body["usage"] = self._counter.running(0, index, is_begun=False).model_dump()
        if self._call.body.return_token_ids:
            body["prompt_token_ids"] = self._call.job.prompts[0]["prompt_token_ids"]
        return event(body)

    def _read(self, one: CompletionOutput) -> tuple[Saying, list[Piece]]:
        """Take in what is new of a choice."""
        said = self._choices.get(one.index)
        if said is None:
            said = self._choices[one.index] = Saying.begin(self._call.reading)
        return said, said.read(one)

    def _chunks(self, said: Saying, pieces: list[Piece], one: CompletionOutput) -> Iterator[str]:
        """What is new, and the end. Logprobs stand with the first of it, or alone."""
        num_top = self._call.num_top_logprobs
        extra: dict[str, Any] = {}
        if num_top is not None and one.token_ids:
            found = chat_logprobs(one, num_top, self._call.state.token_bytes)
            extra["logprobs"] = found.model_dump()
        if self._call.body.return_token_ids and one.token_ids:
            extra["token_ids"] = one.token_ids
        num_started = len(said.call_ids) - sum(isinstance(piece, CallStart) for piece in pieces)
        deltas = []
        for piece in pieces:
            num_started += isinstance(piece, CallStart)
            deltas.append(_delta(piece, num_started - 1, said))
        for delta in deltas or ([{"content": ""}] if extra else []):
            yield self._chunk(one.index, delta, **extra)
            extra = {}
        if one.finish_reason is not None:
            reason = finish_reason(self._call.reading.tools, one, said.has_calls)
            yield self._chunk(one.index, {}, finish_reason=reason, stop_reason=one.stop_reason)

    def _chunk(self, index: int, delta: dict[str, Any], **extra: Any) -> str:
        return event(self._body(index, delta, **extra))

    def _body(self, index: int, delta: dict[str, Any], **extra: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **extra}
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._tells_usage:
            wanted = self._tells_running_usage
            chunk["usage"] = self._counter.running(0, index).model_dump() if wanted else None
        return chunk


def _is_plain(pieces: Sequence[Piece]) -> TypeGuard[Sequence[Content]]:
    return all(isinstance(piece, Content) for piece in pieces)


def _delta(piece: Piece, call_idx: int, said: Saying) -> dict[str, Any]:
    """Of a message, as OpenAI has it; `call_idx`: the call that it belongs to."""
    if isinstance(piece, Content):
        return {"content": piece.text}
    if isinstance(piece, Reasoning):
        return {"reasoning_content": piece.text, "reasoning": piece.text}
    if isinstance(piece, CallStart):
        function = {"name": piece.name, "arguments": ""}
        start = {"index": call_idx, "id": said.call_ids[call_idx], "type": "function"}
        return {"tool_calls": [{**start, "function": function}]}
    return {"tool_calls": [{"index": call_idx, "function": {"arguments": piece.text}}]}
