"""JsonScanner: where a JSON object or array ends, however its text is cut."""

from __future__ import annotations


class JsonScanner:
    def __init__(self, depth: int = 0) -> None:
        """`depth`: how many brackets are open where the text begins."""
        self._depth = depth
        self._in_string = False
        self._is_escaped = False

    def feed(self, text: str) -> int | None:
        """How much of this text the value takes, if it ends in it. Not to be fed again then."""
        for idx, char in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return idx + 1
        return None
