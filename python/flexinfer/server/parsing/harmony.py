"""HarmonyParser: gpt-oss' messages, each with a header that says for whom it is.

    <|start|>assistant<|channel|>analysis<|message|>...<|end|>          reasoning
    <|start|>assistant<|channel|>commentary<|message|>...<|end|>        content: what it will do
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{}<|call|>
    <|start|>assistant<|channel|>final<|message|>...<|return|>          content

The prompt ends with the first `<|start|>assistant`. What a model leaves out or adds is no error:
what cannot be told to be a header is content, and a message for a function that is not known goes
by its channel. Marks never show.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from flexinfer.server.parsing.pieces import (
    CallArguments,
    CallStart,
    Content,
    Piece,
    Reasoning,
    overlap,
)
from flexinfer.server.parsing.stepwise import Stepwise

IN_HEADER = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>")
ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|endoftext|>")
MARK = re.compile("|".join(map(re.escape, (*IN_HEADER, *ENDS))))
LONGEST_MARK = max(map(len, (*IN_HEADER, *ENDS)))
CHANNEL = re.compile("analysis|commentary|final")
RECIPIENT = re.compile(r"to=([^\s<]*)")
FIRST_WORDS = ("assistant", "analysis", "commentary", "final", "to=")
"""Of a header whose first mark is missing."""
MAX_HEAD_CHARS = 64
"""Longer text without a mark, blanks among it, begins no header."""
HEADING = re.compile(
    r"<\|start\|>\s*(?:assistant)?|<\|channel\|>\s*\w*|to=[^\s<]*|<\|constrain\|>\s*\w*"
)
UNFINISHED = ("assistant", "to=", "json", "code")
"""Words of a header that max_tokens may have cut."""


@dataclass(frozen=True)
class Header:
    """What stands before `<|message|>`."""

    channel: str | None
    recipient: str | None
    """Without the namespace of functions."""

    @staticmethod
    def of(text: str) -> Header:
        """The recipient may stand on either side of the channel."""
        found = RECIPIENT.search(text)
        rest = RECIPIENT.sub("", text)
        before, mark, named = rest.rpartition("<|channel|>")
        channel = CHANNEL.search(named) or CHANNEL.search(before if mark else rest)
        return Header(
            channel[0] if channel else None,
            found[1].removeprefix("functions.") if found else None,
        )

    @property
    def is_reasoning(self) -> bool:
        """Unless it is a call."""
        return self.channel == "analysis"


class HarmonyParser(Stepwise):
    """Reasoning, content and calls; neighbouring messages of one kind are parted by a line end."""

    def __init__(self, names: Collection[str], opening: str = "") -> None:
        """`names`: the functions that may be called. `opening`: the header that the prompt has
        begun, after its role."""
        super().__init__(self._outside)
        self._names = names
        self._header = ""
        self._kind: type[Reasoning | Content] | None = None
        """Of the message; None: a call."""
        self._has_begun = False
        """A header or a text."""
        self._has_text = False
        """In this message, blanks of calls apart."""
        self._shown: set[type[Reasoning | Content]] = set()
        self._opened = super().feed(opening)

    def feed(self, text: str) -> list[Piece]:
        opened, self._opened = self._opened, []
        return [*opened, *super().feed(text)]

    def finish(self) -> list[Piece]:
        pieces, self._opened = self._opened, []
        held, self._held = self._held, ""
        if self._step == self._body:
            self._show(held, pieces)
            self._close(pieces)
        elif self._step == self._heading:
            self._show_as_text(leftover(self._header + held), pieces)
        elif held.strip() or not self._has_begun:
            self._show_as_text(held, pieces)
        return pieces

    def _outside(self, pieces: list[Piece]) -> bool:
        """Before a message: a header comes, or text without one."""
        if self._has_begun:  # blanks between messages say nothing
            self._held = self._held.lstrip()
        found = MARK.search(self._held)
        head = self._held[: found.start()] if found else self._held[: self._num_free()]
        may_be_header = _may_begin_header(head)
        if found is None and may_be_header:
            return False
        if found and may_be_header and (_goes_on_header(found[0]) or not head.strip()):
            self._header = ""
            self._step = self._heading
        else:
            self._begin(Content)
        self._has_begun = True
        return True

    def _heading(self, pieces: list[Piece]) -> bool:
        found = MARK.search(self._held)
        num_chars = found.start() if found else self._num_free()  # these are not searched again
        self._header += self._held[:num_chars]
        self._held = self._held[num_chars:]
        if found is None:
            return False
        self._held = self._held.removeprefix(found[0])
        if found[0] == "<|message|>":
            self._open(Header.of(self._header), pieces)
        elif found[0] == "<|start|>" or found[0] in ENDS:  # no message came of it
            self._show_as_text(leftover(self._header), pieces)
            self._header = found[0]
            self._step = self._outside if found[0] in ENDS else self._heading
        else:
            self._header += found[0]
        return True

    def _body(self, pieces: list[Piece]) -> bool:
        found = MARK.search(self._held)
        num_chars = found.start() if found else self._num_free()
        self._show(self._held[:num_chars], pieces)
        self._held = self._held[num_chars:]
        if found is None:
            return False
        if found[0] in ENDS:
            self._held = self._held.removeprefix(found[0])
            self._close(pieces)
            self._step = self._outside
        elif found[0] in ("<|start|>", "<|channel|>"):  # the end before it is missing
            self._close(pieces)
            self._header = ""
            self._step = self._heading
        else:
            self._held = self._held.removeprefix(found[0])
        return True

    def _open(self, header: Header, pieces: list[Piece]) -> None:
        if header.recipient in self._names:
            pieces.append(CallStart(header.recipient or ""))
            self._begin(None)
        elif header.is_reasoning:
            pieces.append(Reasoning(""))  # even if no more comes of it
            self._begin(Reasoning)
        else:
            self._begin(Content)

    def _begin(self, kind: type[Reasoning | Content] | None) -> None:
        self._kind = kind
        self._has_text = False
        self._step = self._body

    def _close(self, pieces: list[Piece]) -> None:
        """A call without arguments is one with an empty object of them."""
        if self._kind is None and not self._has_text:
            pieces.append(CallArguments("{}"))

    def _show(self, text: str, pieces: list[Piece]) -> None:
        if not text:
            return
        if self._kind is None:
            self._has_text |= bool(text.strip())
            pieces.append(CallArguments(text))
            return
        if not self._has_text and self._kind in self._shown:
            text = f"\n{text}"
        self._has_text = True
        self._shown.add(self._kind)
        pieces.append(self._kind(text))

    def _show_as_text(self, text: str, pieces: list[Piece]) -> None:
        self._begin(Content)
        self._show(text, pieces)

    def _num_free(self) -> int:
        """Characters held that no mark can begin in."""
        if "<" not in self._held[-LONGEST_MARK:]:
            return len(self._held)
        return len(self._held) - max(overlap(self._held, mark) for mark in (*IN_HEADER, *ENDS))


def leftover(header: str) -> str:
    """Text in a header that was never finished: an answer whose `<|message|>` is missing."""
    if not MARK.search(header):
        return header.strip()
    rest = HEADING.sub("", header)
    rest = MARK.sub("", rest[: len(rest) - max(overlap(rest, mark) for mark in IN_HEADER)]).strip()
    return "" if any(word.startswith(rest) for word in UNFINISHED) else rest


def _may_begin_header(text: str) -> bool:
    """True of all beginnings of a text of which it is true."""
    head = text.lstrip()
    return len(text) <= MAX_HEAD_CHARS and any(
        head.startswith(word) or word.startswith(head) for word in FIRST_WORDS
    )


def _goes_on_header(mark: str) -> bool:
    return mark in IN_HEADER and mark != "<|start|>"
