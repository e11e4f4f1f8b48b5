"""TokenFilter: tokens that a sequence may not have, by its `allowed_token_ids` and bad words.

Of a bad word only the token that would complete it in the output is forbidden, as in vLLM. No
torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flexinfer.errors import RequestError
from flexinfer.sampling.params import SamplingParams

Mask = np.ndarray[Any, np.dtype[np.bool_]]
MAX_BAD_WORDS = 1024
"""Of one request, as sequences of tokens."""


class TokenFilter:
    """Of one sequence, and of it with proposed tokens."""

    def __init__(self, params: SamplingParams) -> None:
        self._allowed = params.allowed_token_ids
        words = {tuple(word) for word in params.bad_words_token_ids or ()}
        self._single = [word[0] for word in words if len(word) == 1]
        self._longer: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        """By their last token but one."""
        for word in words:
            if len(word) > 1:
                self._longer[word[-2]].append(word)
        self._always: Mask | None = None

    def forbidden(self, output_token_ids: Sequence[int], vocab_size: int) -> Mask:
        """[vocab_size] bool: which tokens may not follow this output. Not to be written to."""
        always = self._always
        if always is None:
            always = np.full(vocab_size, self._allowed is not None)
            if self._allowed is not None:
                always[list(self._allowed)] = False
            always[self._single] = True
            self._always = always
        last = output_token_ids[-1] if output_token_ids else -1
        completing = [
            word[-1]
            for word in self._longer.get(last, ())
            if tuple(output_token_ids[1 - len(word) :]) == word[:-1]
        ]
        if not completing:
            return always
        mask = always.copy()
        mask[completing] = True
        return mask


def filters_tokens(params: SamplingParams) -> bool:
    """Whether a sequence with these params needs a filter."""
    return params.allowed_token_ids is not None or bool(params.bad_words_token_ids)


def with_bad_words_token_ids(params: SamplingParams, tokenizer: Any | None) -> SamplingParams:
    """These params with their `bad_words` as tokens. Raises RequestError."""
    if not params.bad_words:
        return params
    if tokenizer is None:
        raise RequestError("bad_words need a tokenizer, and this engine has none")
    words = [*(params.bad_words_token_ids or ()), *_token_ids(params.bad_words, tokenizer)]
    if len(words) > MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words are {len(words)} sequences of tokens, of at most {MAX_BAD_WORDS}"
        )
    return replace(params, bad_words=None, bad_words_token_ids=words)


def _token_ids(words: Sequence[str], tokenizer: Any) -> Iterator[list[int]]:
    """Each word as it stands at the beginning of a text, and as it stands after a space. (vLLM
    leaves the second form out where it has another number of tokens.)"""
    for word in words:
        text = word.lstrip()
        plain, spaced = (
            tokenizer(prefix + text, add_special_tokens=False).input_ids for prefix in ("", " ")
        )
        if not plain:
            raise RequestError(f"bad_words must have at least one token each, {word!r} has none")
        yield plain
        if spaced != plain:
            yield spaced
