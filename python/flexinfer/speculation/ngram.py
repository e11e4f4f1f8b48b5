"""NgramIndex: what followed the last tokens of a sequence when they stood there before. No torch.

    tokens   a b c d e f a b c        the tail "b c" stood at 1, so "d e f" is proposed
               ^^^ ------     ^^^

Prompt lookup decoding (Saxena, 2023; vLLM's method "ngram"): what summarises, quotes or edits a
text repeats long parts of it. Here the latest place counts, and a proposal that reaches the end of
the sequence goes on in what it has proposed itself, so that a loop is followed round.

Costs a dictionary entry a token and length, some 150 bytes, and a look-up a length and step.
"""

from __future__ import annotations

from collections.abc import Sequence


class NgramIndex:
    """Of one sequence, to which tokens are only appended."""

    def __init__(self, shortest: int, longest: int) -> None:
        """Lengths of the tails that are looked up, the longest first."""
        self._lengths = range(longest, shortest - 1, -1)
        self._tables: list[dict[tuple[int, ...], int]] = [{} for _ in self._lengths]
        """By length: tokens -> where what followed them last begins."""
        self._num_read = 0

    def propose(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """At most `num_tokens` tokens to follow `token_ids`: so many, or none."""
        self._read(token_ids)
        total = len(token_ids)
        tail = tuple(token_ids[-self._lengths[0] :])
        for length, table in zip(self._lengths, self._tables, strict=True):
            place = table.get(tail[-length:])
            if place is not None:
                period = total - place
                return [token_ids[place + i % period] for i in range(num_tokens)]
        return []

    def _read(self, token_ids: Sequence[int]) -> None:
        """Take in what was appended, up to the tokens before the last."""
        total = len(token_ids)
        if total == self._num_read + 1 > self._lengths[0]:  # a step's token: a third of the time
            tail = tuple(token_ids[total - self._lengths[0] - 1 : -1])
            for length, table in zip(self._lengths, self._tables, strict=True):
                table[tail[-length:]] = total - 1
            self._num_read = total
            return
        for length, table in zip(self._lengths, self._tables, strict=True):
            first = max(self._num_read, length)
            if first < total:
                columns = [
                    token_ids[first - length + i : total - length + i] for i in range(length)
                ]
                table.update(zip(zip(*columns, strict=True), range(first, total), strict=True))
        self._num_read = total
