"""Pieces: what a model's text turns out to be while it comes; Answer: what they come to.

Whole answers are read by the same parsers as streamed ones, in one piece: however a text is cut,
the same answer comes of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON of the arguments of the call that started last."""

    text: str


Piece = Reasoning | Content | CallStart | CallArguments


class Parser(Protocol):
    """Reads the text of one answer. What it gives, joined, does not depend on how that is cut."""

    def feed(self, text: str) -> list[Piece]: ...
    def finish(self) -> list[Piece]:
        """What was held back, at the end of the text."""
        ...


@dataclass
class TextPart:
    kind: type[Reasoning] | type[Content]
    text: str


@dataclass
class CallPart:
    name: str
    arguments: str = ""


@dataclass
class Answer:
    """Parts in their order; neighbours of one kind are one part."""

    parts: list[TextPart | CallPart] = field(default_factory=list)

    def add(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            last = self.parts[-1] if self.parts else None
            if isinstance(piece, CallStart):
                self.parts.append(CallPart(piece.name))
            elif isinstance(piece, CallArguments):
                assert isinstance(last, CallPart)
                last.arguments += piece.text
            elif isinstance(last, TextPart) and last.kind is type(piece):
                last.text += piece.text
            else:
                self.parts.append(TextPart(type(piece), piece.text))

    @property
    def content(self) -> str:
        return self._text(Content)

    @property
    def reasoning(self) -> str:
        return self._text(Reasoning)

    @property
    def calls(self) -> list[CallPart]:
        return [part for part in self.parts if isinstance(part, CallPart)]

    def _text(self, kind: type[Reasoning] | type[Content]) -> str:
        return "".join(
            part.text for part in self.parts if isinstance(part, TextPart) and part.kind is kind
        )


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The same in as few pieces as possible, none of them empty."""
    out: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            out.append(piece)
        elif piece.text:
            last = out[-1] if out else None
            if last is not None and type(last) is type(piece):
                out[-1] = type(piece)(last.text + piece.text)
            else:
                out.append(piece)
    return out


def read_whole(parser: Parser, text: str) -> Answer:
    answer = Answer()
    answer.add(parser.feed(text))
    answer.add(parser.finish())
    return answer


def overlap(text: str, mark: str) -> int:
    """Length of the longest beginning of `mark`, but not all of it, that ends `text`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
