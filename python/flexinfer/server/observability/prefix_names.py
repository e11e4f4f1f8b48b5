"""PrefixNames: the first words of what is recorded, to call it after.

What another tenant or a caller with a salt of its own has said is shown to the operator only, who
has the admin key; where none is set, the map is open to this machine, and salted prefixes are not
named.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

MAX_CHARS = 80
_ROLE = re.compile(r"^(?:system|user|assistant|tool)\n")
_SPACES = ("\u2581", "\u0120")
"""How tokenizers write the space before a word; decoding leaves it out at the start."""


class PrefixNames:
    """Of one tokenizer. For any thread."""

    def __init__(self, tokenizer: Any | None, *, shows_salted: bool) -> None:
        self._tokenizer = tokenizer
        self._special = _special_ids(tokenizer)
        self._shows_salted = shows_salted
        self._words = lru_cache(maxsize=4096)(self._decode)

    def of(self, first_tokens: Sequence[int], num_tokens: int, cache_salt: str) -> str:
        """One line of about `MAX_CHARS`, with an ellipsis if there is more; it ends or begins with
        a space where a word does. "" if there are no words, or none that this reader may see."""
        if self._tokenizer is None or not first_tokens or (cache_salt and not self._shows_salted):
            return ""
        if first_tokens[0] < 0:  # no token: a snapshot, recorded under a digest
            return "(recurrent state)"
        words = self._words(tuple(first_tokens))
        is_cut = words.strip() and (len(words) > MAX_CHARS or num_tokens > len(first_tokens))
        return f"{words[:MAX_CHARS].rstrip()}…" if is_cut else words

    def _decode(self, token_ids: tuple[int, ...]) -> str:
        """What stands between special tokens, such as those around a message."""
        runs = [
            _ROLE.sub("", self._text(list(run)))
            for is_special, run in groupby(token_ids, self._special.__contains__)
            if not is_special
        ]
        words = " · ".join(run for run in runs if run.strip())
        return re.sub(r"\s+", " ", words).strip("\N{REPLACEMENT CHARACTER}")

    def _text(self, token_ids: list[int]) -> str:
        assert self._tokenizer is not None
        text: str = self._tokenizer.decode(token_ids)
        first = str(self._tokenizer.convert_ids_to_tokens(token_ids[0]))
        return f" {text}" if first.startswith(_SPACES) and not text.startswith(" ") else text


def _special_ids(tokenizer: Any | None) -> frozenset[int]:
    if tokenizer is None:
        return frozenset()
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = (idx for idx, token in added.items() if getattr(token, "special", False))
    return frozenset((*tokenizer.all_special_ids, *special))
