"""HarmonyText: an answer of gpt-oss as other models write theirs, with thoughts between tags."""

from __future__ import annotations

from flexinfer.server.parsing.harmony import HarmonyParser
from flexinfer.server.parsing.pieces import Content, Piece, Reasoning, joined

OPEN, CLOSE = "<think>\n", "\n</think>\n\n"


class HarmonyText:
    """Of one answer. What may be a mark is held back until more has come."""

    def __init__(self) -> None:
        self._parser = HarmonyParser(())
        self._is_thought = False

    def read(self, text: str, *, is_last: bool) -> str:
        """What is to be shown of the next piece, which has the marks."""
        pieces = self._parser.feed(text)
        if is_last:
            pieces += self._parser.finish()
        return "".join(self._show(piece) for piece in joined(pieces))

    def _show(self, piece: Piece) -> str:
        assert isinstance(piece, Reasoning | Content)  # no function is known that could be called
        is_thought = isinstance(piece, Reasoning)
        is_same, self._is_thought = is_thought == self._is_thought, is_thought
        tag = "" if is_same else OPEN if is_thought else CLOSE
        return f"{tag}{piece.text}"
