"""Stepwise: what the parsers of calls share that read a text in steps, some of it held back."""

from __future__ import annotations

from collections.abc import Callable

from flexinfer.server.parsing.pieces import Content, Piece


class Stepwise:
    def __init__(self, first: Callable[[list[Piece]], bool]) -> None:
        self._held = ""
        """What no piece has been made of."""
        self._framing = ""
        """What has been read of what may become a call: the blanks and marks before it."""
        self._has_content = False
        """In this stretch of text."""
        self._is_after_call = False
        self._step = first
        """Reads what it can of what is held, and says whether there is more to read."""

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    def _enter(self, begin: int, num_chars: int, pieces: list[Piece]) -> None:
        """What may be a call begins at `begin`, with a mark of so many characters. Blanks before
        it say nothing, but for the case that it is none."""
        if self._has_content or self._held[:begin].strip():
            self._say(self._held[:begin], pieces)
            self._held, begin = self._held[begin:], 0
        end = begin + num_chars
        self._framing, self._held = self._held[:end], self._held[end:]

    def _say(self, text: str, pieces: list[Piece]) -> None:
        if text:
            self._has_content = True
            pieces.append(Content(text))
