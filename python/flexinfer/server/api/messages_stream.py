"""MessageStream: the events of one streamed message, in Anthropic's order.

message_start, then for each block content_block_start (after the first one a ping),
content_block_delta and content_block_stop, then message_delta and message_stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flexinfer.server.http.streaming import event
from flexinfer.server.parsing.pieces import CallArguments, CallStart, Content, Piece, Reasoning
from flexinfer.server.protocol.messages import MessageAnswer


class MessageStream:
    def __init__(self) -> None:
        self._num_blocks = 0
        self._open: type[Piece] | None = None
        self._num_calls = 0

    def start(self, empty: MessageAnswer) -> str:
        """`empty`: the message with nothing in it yet."""
        return _event("message_start", message=empty.model_dump())

    def add(self, pieces: Sequence[Piece], call_ids: Sequence[str]) -> str:
        """`call_ids`: of all calls so far."""
        events = ""
        for piece in pieces:
            if isinstance(piece, CallStart):
                self._num_calls += 1
                block = {"type": "tool_use", "id": call_ids[self._num_calls - 1]}
                events += self._begin(piece, {**block, "name": piece.name, "input": {}})
                continue
            kind, field, delta = _KINDS[type(piece)]
            if kind is not None and self._open is not type(piece):
                extra = {} if kind == "text" else {"signature": ""}
                events += self._begin(piece, {"type": kind, field: "", **extra})
            events += _event(
                "content_block_delta",
                index=self._num_blocks - 1,
                delta={"type": delta, field: piece.text},
            )
        return events

    def finish(self, done: MessageAnswer) -> str:
        ending = {"stop_reason": done.stop_reason, "stop_sequence": done.stop_sequence}
        return (
            self._end()
            + _event("message_delta", delta=ending, usage=done.usage.model_dump())
            + _event("message_stop")
        )

    def _begin(self, piece: Piece, block: dict[str, Any]) -> str:
        events = self._end()
        events += _event("content_block_start", index=self._num_blocks, content_block=block)
        if not self._num_blocks:
            events += _event("ping")
        self._num_blocks += 1
        self._open = type(piece)
        return events

    def _end(self) -> str:
        if self._open is None:
            return ""
        index, is_thought = self._num_blocks - 1, self._open is Reasoning
        self._open = None
        signed = {"type": "signature_delta", "signature": ""}
        events = _event("content_block_delta", index=index, delta=signed) if is_thought else ""
        return events + _event("content_block_stop", index=index)


_KINDS: dict[type[Piece], tuple[str | None, str, str]] = {
    Content: ("text", "text", "text_delta"),
    Reasoning: ("thinking", "thinking", "thinking_delta"),
    CallArguments: (None, "partial_json", "input_json_delta"),
}
"""Of a piece: the block that it begins, the field that it adds to, the type of its delta."""


def _event(kind: str, **fields: Any) -> str:
    return event({"type": kind, **fields}, kind)
