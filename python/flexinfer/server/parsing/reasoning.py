"""Reasoning: what a model writes between two tags before it answers.

Line ends next to a tag belong to the tag. Where a text begins is decided by the prompt: many chat
templates open the tag themselves, or close it, where thinking is switched off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flexinfer.server.parsing.pieces import Content, Parser, Piece, Reasoning, overlap


@dataclass(frozen=True)
class ReasoningForm:
    open: str
    close: str
    begins_open: bool = False
    """Text is reasoning from its start, open tag or not, unless the prompt has closed the tag."""
    is_special: bool = False
    """The tags are special tokens, which text is without by default."""


THINK = ReasoningForm("<think>", "</think>")
BEGUN = ReasoningForm("<think>", "</think>", begins_open=True)
FORMS = {
    "deepseek_r1": BEGUN,
    "deepseek_v3": THINK,
    "ernie45": BEGUN,
    "glm45": THINK,
    "holo2": THINK,
    "kimi_k2": THINK,
    "minimax_m2": BEGUN,
    "mistral": ReasoningForm("[THINK]", "[/THINK]", is_special=True),
    "nemotron_v3": BEGUN,
    "olmo3": BEGUN,
    "qwen3": THINK,
    "seed_oss": ReasoningForm("<seed:think>", "</seed:think>", begins_open=True),
    "step3": BEGUN,
}
"""By the names that vLLM has for them."""
HARMONY = ("openai_gptoss", "gpt_oss", "gpt-oss")
"""vLLM's name, and SGLang's, for what is no pair of tags: parsing/harmony.py reads it."""
NOT_TAGS = {
    "granite": "sentences in place of tags",
    "hunyuan_a13b": "several tags in a row",
}


def check_reasoning_parser(name: str) -> None:
    """Raises ValueError for a name that is not served, with those that are."""
    if name not in HARMONY:
        reasoning_form(name)


def reasoning_form(name: str) -> ReasoningForm:
    """The tags of this name. Raises ValueError as `check_reasoning_parser`."""
    known = ", ".join(sorted([*FORMS, HARMONY[0]]))
    if name in NOT_TAGS:
        raise ValueError(
            f"the reasoning parser {name!r} is not served: {NOT_TAGS[name]} are not read here, "
            f"only pairs of tags and Harmony ({known})"
        )
    if name not in FORMS:
        raise ValueError(f"unknown reasoning parser {name!r}; there are {known}")
    return FORMS[name]


def opened_by(form: ReasoningForm, prompt_end: str) -> bool | None:
    """Whether a text that follows this begins in reasoning; None: it says so itself."""
    prompt = prompt_end.rstrip()
    if prompt.endswith(form.open):
        return True
    if prompt.endswith(form.close):
        return False
    return True if form.begins_open else None


def num_reasoning_tokens(form: ReasoningForm, tokenizer: Any, token_ids: Sequence[int]) -> int:
    """Tokens up to and with that which completes the closing tag; all of them without one."""
    close_id = tokenizer.convert_tokens_to_ids(form.close)
    if close_id in token_ids:
        return token_ids.index(close_id) + 1
    low, high = 0, len(token_ids)
    while low < high:  # the fewest tokens whose text has the tag
        middle = (low + high) // 2
        if form.close in tokenizer.decode(token_ids[:middle], skip_special_tokens=False):
            high = middle
        else:
            low = middle + 1
    return low


class ReasoningParser:
    """Reasoning first; what follows is read by another parser, or is content."""

    def __init__(self, form: ReasoningForm, is_open: bool | None, then: Parser | None) -> None:
        """`is_open`: see `opened_by`."""
        self._form = form
        self._then = then
        self._mode = "answer" if is_open is False else "start"
        self._unless = "reasoning" if is_open else "answer"
        self._held = ""

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        self._held += text
        if self._mode == "start":
            self._begin(pieces)
        self._skip_newlines("open", "reasoning")
        if self._mode == "reasoning":
            self._reason(pieces)
        self._skip_newlines("gap", "answer")
        if self._mode == "answer":
            pieces += self._answer()
        return pieces

    def finish(self) -> list[Piece]:
        if self._mode == "start":
            self._mode = self._unless
        pieces: list[Piece] = []
        if self._mode == "reasoning":
            pieces.append(Reasoning(self._held.rstrip("\r\n")))
            self._held = ""
        pieces += self._answer()
        return pieces + self._then.finish() if self._then else pieces

    def _begin(self, pieces: list[Piece]) -> None:
        stripped = self._held.lstrip()
        is_tagged = stripped.startswith(self._form.open)
        if is_tagged:
            self._held = stripped[len(self._form.open) :]
        elif self._form.open.startswith(stripped):  # as far as it goes
            return
        if is_tagged or self._unless == "reasoning":
            self._mode = "open"
            pieces.append(Reasoning(""))  # even if no more comes of it
        else:
            self._mode = "answer"

    def _skip_newlines(self, mode: str, then: str) -> None:
        if self._mode == mode:
            self._held = self._held.lstrip("\r\n")
            if self._held:
                self._mode = then

    def _reason(self, pieces: list[Piece]) -> None:
        close = self._form.close
        end = self._held.find(close)
        if end >= 0:
            pieces.append(Reasoning(self._held[:end].rstrip("\r\n")))
            self._held = self._held[end + len(close) :]
            self._mode = "gap"
            return
        num_free = len(self._held) - overlap(self._held, close)
        num_free = len(self._held[:num_free].rstrip("\r\n"))
        pieces.append(Reasoning(self._held[:num_free]))
        self._held = self._held[num_free:]

    def _answer(self) -> list[Piece]:
        held, self._held = self._held, ""
        if self._then is not None:
            return self._then.feed(held)
        return [Content(held)] if held else []
