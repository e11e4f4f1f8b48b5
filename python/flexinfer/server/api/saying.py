"""Saying: what one choice of a chat has said so far, read as reasoning, content and calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from flexinfer.outputs import CompletionOutput
from flexinfer.server.api.reading import Reading
from flexinfer.server.observability.logs import new_id
from flexinfer.server.parsing.pieces import (
    Answer,
    CallArguments,
    CallStart,
    Content,
    Parser,
    Piece,
    Reasoning,
    joined,
)
from flexinfer.server.protocol.chat import AnswerMessage, FunctionCall, ToolCall


@dataclass
class Saying:
    reading: Reading
    parser: Parser | None
    answer: Answer = field(default_factory=Answer)
    call_ids: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    has_reasoned: bool = False
    _num_read_calls: int = 0

    @staticmethod
    def begin(reading: Reading) -> Saying:
        return Saying(reading, reading.parser())

    def read(self, one: CompletionOutput) -> list[Piece]:
        """What an output adds; none of the pieces is empty."""
        self.token_ids += one.token_ids
        pieces: list[Piece] = [Content(one.text)] if one.text else []
        if self.parser is not None:
            pieces = self.parser.feed(one.text)
            if one.finish_reason is not None:
                pieces += self.parser.finish()
            self.has_reasoned |= any(isinstance(piece, Reasoning) for piece in pieces)
            if not self.reading.shows_reasoning:
                pieces = [piece for piece in pieces if not isinstance(piece, Reasoning)]
            if not self.reading.tools.parallel:
                pieces = self._without_more_calls(pieces)
            pieces = joined(pieces)
        self.answer.add(pieces)
        self.call_ids += [self._new_id() for piece in pieces if isinstance(piece, CallStart)]
        return pieces

    @property
    def has_calls(self) -> bool:
        return bool(self.call_ids)

    @property
    def num_reasoning_tokens(self) -> int:
        """With those of the marks."""
        return self.reading.num_reasoning_tokens(self.token_ids) if self.has_reasoned else 0

    @property
    def message(self) -> AnswerMessage:
        """As a whole."""
        reasoning = self.answer.reasoning or None
        only_content = reasoning is None and not self.has_calls
        return AnswerMessage(
            content=self.answer.content if self.answer.content or only_content else None,
            reasoning_content=reasoning,
            reasoning=reasoning,
            tool_calls=self.tool_calls or None,
        )

    @property
    def tool_calls(self) -> list[ToolCall]:
        return [
            ToolCall(id=name, function=FunctionCall(name=call.name, arguments=call.arguments))
            for name, call in zip(self.call_ids, self.answer.calls, strict=True)
        ]

    def _without_more_calls(self, pieces: Iterable[Piece]) -> list[Piece]:
        """All but what belongs to calls behind the first."""
        kept: list[Piece] = []
        for piece in pieces:
            self._num_read_calls += isinstance(piece, CallStart)
            is_call = isinstance(piece, (CallStart, CallArguments))
            if not (is_call and self._num_read_calls > 1):
                kept.append(piece)
        return kept

    def _new_id(self) -> str:
        num_chars = self.reading.num_id_chars
        return new_id()[:num_chars] if num_chars else f"call_{new_id()[:24]}"
