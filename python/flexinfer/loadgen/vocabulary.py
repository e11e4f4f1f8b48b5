"""Vocabularies: what random prompts are made of, and how long they are in tokens.

With the server's tokenizer prompts have exactly the length that is asked for. Without one they are
common English words, about one token each, and the server's own count is what is reported.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

_TEXT = (
    "the of and to in is that for it as was with be by on not he his but at are this have from "
    "or had an they which one you were all her she there would their we him been has when who "
    "will no more if out so up said what its about than into them can only other time new some"
)
WORDS = tuple(_TEXT.split())


class Vocabulary(Protocol):
    """Pieces that prompts are drawn from; each is about one token."""

    def draw(self, num_tokens: int, rng: random.Random) -> Sequence[Any]:
        """So many pieces at random."""
        ...

    def prompt(self, pieces: Sequence[Any]) -> str | list[int]:
        """The prompt that they make."""
        ...


class WordVocabulary:
    """Words, for servers whose tokenizer is not at hand."""

    def draw(self, num_tokens: int, rng: random.Random) -> Sequence[str]:
        return rng.choices(WORDS, k=num_tokens)

    def prompt(self, pieces: Sequence[Any]) -> str | list[int]:
        return " ".join(pieces)


class TokenVocabulary:
    """Token ids of a tokenizer.json, special tokens left out."""

    def __init__(self, file: Path, *, as_text: bool) -> None:
        """`as_text`: prompts as decoded text, as a chat wants them; their length may then differ
        a little. Raises ValueError if the file is not a tokenizer."""
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:
            raise ValueError(f"{file} is not a tokenizer: {error}") from error
        special = self._tokenizer.get_added_tokens_decoder()
        self._ids = sorted(set(self._tokenizer.get_vocab().values()) - set(special))
        self._as_text = as_text

    def draw(self, num_tokens: int, rng: random.Random) -> Sequence[int]:
        return rng.choices(self._ids, k=num_tokens)

    def prompt(self, pieces: Sequence[Any]) -> str | list[int]:
        ids = list(pieces)
        if not self._as_text:
            return ids
        text: str = self._tokenizer.decode(ids)
        return text


def load_vocabulary(tokenizer: str | None, *, as_text: bool) -> Vocabulary:
    """Of a model's folder or a tokenizer.json; None: words. Raises ValueError."""
    if tokenizer is None:
        return WordVocabulary()
    path = Path(tokenizer)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"--tokenizer: there is no {file}")
    return TokenVocabulary(file, as_text=as_text)
