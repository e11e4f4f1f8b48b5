"""Text from tokens, one token at a time, and the stop strings in it. No torch.

A token is not a piece of text: a character may span tokens, and a token's text depends on the ones
before it. So a window of tokens is decoded with and without its newest ones, and the difference is
the new text, once it does not end in an incomplete character (the technique of vLLM and TGI).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

CONTEXT_TOKENS = 5
"""Prompt tokens that stand before the first output token, for its leading space."""
MAX_PENDING_TOKENS = 16
"""Tokens held back for an incomplete character; more of them are not a character."""
REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """The text of one request's output; what it returns joins to the text of all its tokens."""

    def __init__(
        self, tokenizer: Any, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        self._decode = _decoder(tokenizer, skip_special_tokens)
        self._token_ids = list(prompt_token_ids[-CONTEXT_TOKENS:])
        self._window_start = 0
        self._num_read = len(self._token_ids)

    def append(self, token_id: int) -> str:
        """Add a token; returns the text that is certain now, often of this token."""
        self._token_ids.append(token_id)
        is_pending = len(self._token_ids) - self._num_read < MAX_PENDING_TOKENS
        return self._read(hold_incomplete=is_pending)

    def flush(self) -> str:
        """The text that was held back, at the end."""
        return self._read(hold_incomplete=False)

    def _read(self, *, hold_incomplete: bool) -> str:
        before = self._decode(self._token_ids[self._window_start : self._num_read])
        now = self._decode(self._token_ids[self._window_start :])
        if len(now) <= len(before) or (hold_incomplete and now.endswith(REPLACEMENT)):
            return ""
        self._window_start = self._num_read
        self._num_read = len(self._token_ids)
        return now[len(before) :]


def _decoder(tokenizer: Any, skip_special_tokens: bool) -> Callable[[list[int]], str]:
    """The text of a list of tokens: `tokenizer.decode(...)`, or the call that it comes to.

    transformers looks first whether it has been given an array, a batch or a mapping, which takes
    three times as long as the text.
    """
    kind: Any = type(tokenizer)
    if _only_asks_backend(kind):
        decode = tokenizer.backend_tokenizer.decode
        return lambda token_ids: decode(token_ids, skip_special_tokens=skip_special_tokens)
    return lambda token_ids: tokenizer.decode(
        token_ids,
        skip_special_tokens=skip_special_tokens,
        clean_up_tokenization_spaces=False,
    )


@cache
def _only_asks_backend(kind: Any) -> bool:
    """Whether `decode` without cleaning up is its backend's: of transformers' own code alone."""
    from transformers import PreTrainedTokenizerFast as Fast

    return issubclass(kind, Fast) and all(
        getattr(kind, name) is getattr(Fast, name)
        for name in ("decode", "_decode", "backend_tokenizer")
    )


def special_texts(tokenizer: Any | None) -> dict[int, str]:
    """Of each special token, by its id."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {idx: token.content for idx, token in added.items() if token.special}


class StopStrings:
    """Collects the text of one request, ends it at a stop string, and says what may be shown.

    What special tokens show is whole or nothing: a stop string neither begins nor ends within.
    """

    def __init__(self, stop: Sequence[str], *, include_in_output: bool) -> None:
        self.text = ""
        """All text so far, cut at the stop string once one is found."""
        self._stop = tuple(stop)
        self._special: list[tuple[int, int]] = []
        """Where the text of special tokens begins and ends."""
        self._include = include_in_output
        self._num_shown = 0

    def append(self, new_text: str, *, check: bool = True, special: str = "") -> str | None:
        """Add text; returns the stop string that it completes, if any.

        Of several, the one that begins first. `check=False` adds without looking (min_tokens).
        `special`: the text of a special token, if it comes of one.
        """
        num_old = len(self.text)
        self.text += new_text
        if special and new_text.endswith(special):
            self._special.append((len(self.text) - len(special), len(self.text)))
        if not check or not new_text:
            return None
        found = [(self._find(stop, num_old), stop) for stop in self._stop]
        begin, stop = min((hit for hit in found if hit[0] >= 0), default=(-1, None))
        if stop is not None:
            self.text = self.text[: begin + (len(stop) if self._include else 0)]
        return stop

    def take(self, *, finished: bool) -> str:
        """The text since the last take, less a tail that may become a stop string."""
        end = len(self.text) - (0 if finished else self._num_held())
        new_text = self.text[self._num_shown : end]
        self._num_shown = max(self._num_shown, end)
        return new_text

    def shown(self, *, finished: bool) -> str:
        """All text, less a tail that may become a stop string."""
        return self.text[: len(self.text) - (0 if finished else self._num_held())]

    def _find(self, stop: str, num_old: int) -> int:
        begin = self.text.find(stop, max(0, num_old - len(stop) + 1))
        while begin >= 0 and self._cuts_special(begin, begin + len(stop)):
            begin = self.text.find(stop, begin + 1)
        return begin

    def _cuts_special(self, begin: int, end: int) -> bool:
        for first, last in reversed(self._special):
            if last <= begin:  # as all before it, of which there may be many
                return False
            if first < begin or first < end < last:
                return True
        return False

    def _num_held(self) -> int:
        """Length of the longest tail that begins a stop string."""
        if self._include:
            return 0
        return max((_overlap(self.text, stop) for stop in self._stop), default=0)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that ends `text`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
