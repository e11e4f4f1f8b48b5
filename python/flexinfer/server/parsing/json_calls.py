"""Calls whose arguments are a JSON object: most models' way, with other marks around it.

A call is sure, and its arguments are shown as they come, once a known name and the first bracket
of the arguments have been read. Before that its text is held; what turns out to be no call of a
known function is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from flexinfer.server.parsing.json_scanner import JsonScanner
from flexinfer.server.parsing.pieces import CallArguments, CallStart, Content, Piece, overlap
from flexinfer.server.parsing.stepwise import Stepwise

NAMED = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
FRAMING = re.compile(r"[\s\[\],;`]|<[|｜/][^<>]*>")
"""What stands between calls and after them without saying anything."""


@dataclass(frozen=True)
class JsonForm:
    """`begin` [`head`] {...} [[`head`] {...} ...] [`end`]"""

    begin: str = ""
    """Before the first call; what comes before it is text. Empty: nothing."""
    end: str = ""
    """After the last one; "": the text's end."""
    head: re.Pattern[str] | None = None
    """Before the arguments, with the name as its group. Without it the name is in the JSON:
    `{"name": ..., "arguments": {...}}`, where the arguments may also be called parameters."""
    is_bare: bool = False
    """A text may also begin with a call, without `begin`."""


class JsonCalls(Stepwise):
    def __init__(self, form: JsonForm, names: Collection[str]) -> None:
        super().__init__(self._text)
        self._form = form
        self._names = names
        self._num_calls = 0
        """In this section."""
        self._may_be_bare = form.is_bare
        self._scanner = JsonScanner()
        self._num_scanned = 0

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._step == self._section and self._num_calls:
            rest = FRAMING.sub("", self._held)
            if rest and self._form.head is None and not self._form.end.startswith(rest):
                self._say(self._held, pieces)
        elif self._step in (self._text, self._section, self._object):
            self._say(self._framing + self._held, pieces)
        self._held = ""
        return pieces

    def _text(self, pieces: list[Piece]) -> bool:
        if not self._has_content:  # blanks around calls say nothing
            if self._is_after_call:
                self._held = self._held.lstrip()
            blank = len(self._held) - len(self._held.lstrip())
            if blank == len(self._held):
                return False
            if self._may_be_bare and self._held[blank] in "[{":
                return self._begin_section(blank, 0, pieces)
        begin = self._form.begin
        found = self._held.find(begin) if begin else -1
        if found >= 0:
            return self._begin_section(found, len(begin), pieces)
        num_free = len(self._held) - overlap(self._held, begin)
        if self._has_content or self._held[:num_free].strip():
            self._say(self._held[:num_free], pieces)
            self._held = self._held[num_free:]
        return False

    def _begin_section(self, begin: int, num_chars: int, pieces: list[Piece]) -> bool:
        self._enter(begin, num_chars, pieces)
        self._num_calls = 0
        self._step = self._section
        return True

    def _section(self, pieces: list[Piece]) -> bool:
        """Between calls: another one begins, or the section ends."""
        begin = self._held.find("{")
        end = self._held.find(self._form.end) if self._form.end else -1
        if end >= 0 and (begin < 0 or end < begin):
            whole = self._framing + self._held[: end + len(self._form.end)]
            self._held = self._held[end + len(self._form.end) :]
            self._leave("" if self._num_calls else whole, pieces)
            return True
        if begin < 0:
            return False
        head = self._framing + self._held[:begin]
        self._framing, self._held = head, self._held[begin:]
        self._scanner, self._num_scanned = JsonScanner(), 0
        found = self._form.head.search(head) if self._form.head else None
        if found is None:
            self._step = self._object
        elif found[1] in self._names:
            self._start(found[1], pieces)
            self._step = self._arguments
        else:
            self._leave(head, pieces)
        return True

    def _object(self, pieces: list[Piece]) -> bool:
        """A call with its name in it, not yet sure."""
        found = NAMED.match(self._held)
        if found and found[1] in self._names:
            self._held = self._held[found.end() :]
            self._start(found[1], pieces)
            self._scanner = JsonScanner()
            self._step = self._named_arguments
            return True
        end = self._scanner.feed(self._held[self._num_scanned :])
        if end is None:
            self._num_scanned = len(self._held)
            return False
        end += self._num_scanned
        whole, self._held = self._held[:end], self._held[end:]
        call = _call(whole)
        if call is None or call[0] not in self._names:
            self._leave(self._framing + whole, pieces)
        else:
            self._start(call[0], pieces)
            pieces.append(CallArguments(call[1]))
            self._step = self._section
        return True

    def _arguments(self, pieces: list[Piece]) -> bool:
        return self._show_arguments(pieces, self._section)

    def _named_arguments(self, pieces: list[Piece]) -> bool:
        is_over = self._show_arguments(pieces, self._rest)
        if is_over:
            self._scanner = JsonScanner(depth=1)
        return is_over

    def _show_arguments(self, pieces: list[Piece], then: Callable[[list[Piece]], bool]) -> bool:
        end = self._scanner.feed(self._held)
        pieces.append(CallArguments(self._held[:end]))
        self._held = "" if end is None else self._held[end:]
        if end is not None:
            self._step = then
        return end is not None

    def _rest(self, pieces: list[Piece]) -> bool:
        """Of the object around the arguments."""
        end = self._scanner.feed(self._held)
        self._held = "" if end is None else self._held[end:]
        if end is not None:
            self._step = self._section
        return end is not None

    def _start(self, name: str, pieces: list[Piece]) -> None:
        pieces.append(CallStart(name))
        self._framing = ""
        self._num_calls += 1

    def _leave(self, text: str, pieces: list[Piece]) -> None:
        """Back to plain text, of which this is the first."""
        self._framing = ""
        self._may_be_bare = False
        self._has_content = False
        self._is_after_call = not text
        self._say(text, pieces)
        self._step = self._text


class ForcedCall:
    """The whole text is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._start: list[Piece] = [CallStart(name)]

    def feed(self, text: str) -> list[Piece]:
        start, self._start = self._start, []
        return [*start, CallArguments(text)]

    def finish(self) -> list[Piece]:
        """Cut off by max_tokens, the arguments are not JSON; OpenAI, too, returns them so."""
        return self._start


class RequiredCalls:
    """The whole text is a list of calls; what max_tokens has left of one that is not sure is
    nothing."""

    def __init__(self, names: Collection[str]) -> None:
        self._calls = JsonCalls(JsonForm(is_bare=True), names)

    def feed(self, text: str) -> list[Piece]:
        return [piece for piece in self._calls.feed(text) if not isinstance(piece, Content)]

    def finish(self) -> list[Piece]:
        return []


def _call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call, in any order; arguments may be missing, or JSON in a text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        return name, arguments
    return name, json.dumps(arguments or {}, ensure_ascii=False)
