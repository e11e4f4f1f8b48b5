"""ResponseStream: the events of one response of /v1/responses, numbered, as OpenAI orders them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flexinfer.server.api.response_items import item_of, new_item_id
from flexinfer.server.http.streaming import event
from flexinfer.server.parsing.pieces import Answer, CallPart, CallStart, Content, Piece, TextPart
from flexinfer.server.protocol.chat import ContentLogprob
from flexinfer.server.protocol.responses import Response


class ResponseStream:
    """Opens an item when it gets its first text, and closes it when the next one begins."""

    def __init__(self, empty: Response) -> None:
        """`empty`: the response before anything is generated."""
        self._empty = empty
        self._answer = Answer()
        self._sequence = 0
        self.item_ids: list[str] = []
        self._call_id: str | None = None
        self.logprobs: list[ContentLogprob] = []
        """Of all tokens, if they are asked for; then the answer is one text."""
        self._num_told = 0

    def start(self) -> list[str]:
        """Only once."""
        if self._sequence:
            return []
        empty = self._empty.model_dump(by_alias=True)
        return [
            self._event("response.created", response=empty),
            self._event("response.in_progress", response=empty),
        ]

    def add(
        self, pieces: Sequence[Piece], call_ids: Sequence[str], logprobs: Sequence[ContentLogprob]
    ) -> list[str]:
        """`call_ids`: of all calls so far; `logprobs`: of the tokens that are new."""
        events: list[str] = []
        self.logprobs += logprobs
        for piece in pieces:
            before = list(self._answer.parts)
            self._answer.add([piece])
            if len(self._answer.parts) > len(before):
                if before:
                    events += self._close(before[-1])
                num_calls = len(self._answer.calls)
                is_call = isinstance(piece, CallStart)
                self._call_id = call_ids[num_calls - 1] if is_call else None
                events += self._open(self._answer.parts[-1])
            if not isinstance(piece, CallStart):
                extra = {"logprobs": self._new_logprobs()} if isinstance(piece, Content) else {}
                events.append(self._item_event("delta", delta=piece.text, **extra))
        return events

    def finish(self, done: Response) -> list[str]:
        events: list[str] = []
        if not self._answer.parts:
            self._answer.parts.append(TextPart(Content, ""))
            self.item_ids.append(done.output[0].id or "")
            events += self._open(self._answer.parts[0], is_new=False)
        events += self._close(self._answer.parts[-1], done.output[-1].model_dump())
        name = "response.completed" if done.status == "completed" else "response.incomplete"
        return [*events, self._event(name, response=done.model_dump(by_alias=True))]

    def _new_logprobs(self) -> list[dict[str, Any]]:
        """Those that no event has told of."""
        new = self.logprobs[self._num_told :]
        self._num_told = len(self.logprobs)
        return _dumped(new)

    @property
    def _where(self) -> dict[str, Any]:
        """The last item."""
        where = {"item_id": self.item_ids[-1], "output_index": len(self.item_ids) - 1}
        is_call = isinstance(self._answer.parts[-1], CallPart)
        return where if is_call else {**where, "content_index": 0}

    def _open(self, part: TextPart | CallPart, *, is_new: bool = True) -> list[str]:
        if is_new:
            self.item_ids.append(new_item_id(part))
        item = item_of(part, self.item_ids[-1], self._call_id, "in_progress").model_dump()
        index = len(self.item_ids) - 1
        events = [self._event("response.output_item.added", output_index=index, item=item)]
        if isinstance(part, TextPart):
            begun = {**_content(part), "text": ""}
            events.append(self._event("response.content_part.added", **self._where, part=begun))
        return events

    def _close(self, part: TextPart | CallPart, item: dict[str, Any] | None = None) -> list[str]:
        """`item`: as it is in the end; by default it is complete."""
        index = len(self.item_ids) - 1
        where = {"item_id": self.item_ids[-1], "output_index": index}
        if item is None:
            item = item_of(part, self.item_ids[-1], self._call_id, "completed").model_dump()
        if isinstance(part, CallPart):
            arguments = {"name": part.name, "arguments": part.arguments}
            events = [self._event("response.function_call_arguments.done", **where, **arguments)]
        else:
            where["content_index"] = 0
            kind = _content(part)["type"]
            whole = _content(part)
            extra = {}
            if part.kind is Content:
                whole["logprobs"] = extra["logprobs"] = _dumped(self.logprobs)
            events = [
                self._event(f"response.{kind}.done", **where, text=part.text, **extra),
                self._event("response.content_part.done", **where, part=whole),
            ]
        return [
            *events,
            self._event("response.output_item.done", output_index=index, item=item),
        ]

    def _item_event(self, what: str, **fields: Any) -> str:
        part = self._answer.parts[-1]
        is_call = isinstance(part, CallPart)
        kind = "function_call_arguments" if is_call else _content(part)["type"]
        return self._event(f"response.{kind}.{what}", **self._where, **fields)

    def _event(self, event_type: str, /, **fields: Any) -> str:
        data = {"type": event_type, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event(data, event_type)


def _dumped(logprobs: Sequence[ContentLogprob]) -> list[dict[str, Any]]:
    return [one.model_dump() for one in logprobs]


def _content(part: TextPart | CallPart) -> dict[str, Any]:
    """The only content of a message or of reasoning."""
    assert isinstance(part, TextPart)
    if part.kind is Content:
        return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": part.text}
