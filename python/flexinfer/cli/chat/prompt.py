"""PromptReader: what a person types, one message at a time. A line may go on, and so may a message.

hello                      one line
first line \\               a backslash at its end: the message goes on
second line
\"\"\"                        a block: everything up to the next \"\"\", as it is
any number of lines
\"\"\"
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from io import TextIOWrapper

BLOCK = '"""'


class NotTextError(ValueError):
    """A message with bytes that are no text: no tokenizer takes it, and no request."""


class PromptReader:
    """Reads messages from a terminal with line editing, or from a pipe without prompts."""

    def __init__(self, read_line: Callable[[str], str] | None = None) -> None:
        """`read_line` shows a prompt and returns a line; it raises EOFError at the end. Raises
        ValueError without it if stdin is closed."""
        self._read_line = read_line or _line_reader()

    def read(self) -> str | None:
        """The next message; None at the end of input. Raises NotTextError for one that is to be
        left out: the next may be text again."""
        message = self._message()
        if message is not None and any("\ud800" <= char <= "\udfff" for char in message):
            raise NotTextError("that message is not text in UTF-8: it was not sent")
        return message

    def _message(self) -> str | None:
        try:
            line = self._read_line("> ")
        except EOFError:
            return None
        if line.lstrip().startswith(BLOCK):
            return self._block(line.lstrip().removeprefix(BLOCK))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            more = self._more()
            if more is None:
                break
            lines.append(more)
        return "\n".join(lines).strip()

    def _block(self, line: str | None) -> str:
        lines: list[str] = []
        while line is not None:
            before, end, _ = line.partition(BLOCK)
            if before or lines:
                lines.append(before)
            if end:
                break
            line = self._more()
        return "\n".join(lines).strip()

    def _more(self) -> str | None:
        try:
            return self._read_line("... ")
        except EOFError:
            return None


def _line_reader() -> Callable[[str], str]:
    if sys.stdin is None:  # `<&-`
        raise ValueError("stdin is closed: there is nothing to read messages from")
    if isinstance(sys.stdin, TextIOWrapper):  # its own error leaves it in the middle of a line
        sys.stdin.reconfigure(errors="surrogateescape")
    if sys.stdin.isatty():
        import readline  # noqa: F401  editing and history for input()

        return input

    def from_pipe(_: str) -> str:
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    return from_pipe
