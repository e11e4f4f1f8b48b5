"""Acceptance: how often the proposals for one request turn out right. No torch.

The first token of a proposal is right less often than a later one is once those before it are: a
text either goes on being repeated or does not. So there are two rates, recent proposals counting
most, and token i of a proposal is accepted with probability first x later^(i - 1).
"""

from __future__ import annotations

from collections.abc import Sequence

DECAY = 0.9
"""What a hit counts one trial later: the last 10 trials count."""
PRIOR_TRIALS = 2.0
PATIENCE = 64
"""After so many tokens of which nothing was proposed, nothing is known any more: another try."""


class Acceptance:
    """Of one request."""

    def __init__(self) -> None:
        self._guess: Sequence[int] = ()  # proposed, and not verified by the model
        self._num_right = 0
        self._forget()

    def probabilities(self, num_tokens: int) -> list[float]:
        """That each token of a proposal of so many is accepted; each at most the one before it."""
        found, chance = [], self._first.value
        for _ in range(num_tokens):
            found.append(chance)
            chance *= self._later.value
        return found

    def observe(self, num_proposed: int, num_accepted: int) -> None:
        """A proposal was verified."""
        self._guess = ()
        self._num_unknown = 0
        for place in range(min(num_accepted + 1, num_proposed)):
            self._note(place, is_right=place < num_accepted)

    def guess(self, token_ids: Sequence[int]) -> None:
        """This would have been proposed: `observe_token` tells whether it would have been right."""
        if not self._guess:
            self._guess, self._num_right = token_ids, 0

    def observe_token(self, token_id: int) -> None:
        """The request got a token without a proposal."""
        if not self._guess:
            self._num_unknown += 1
            if self._num_unknown == PATIENCE:
                self._forget()
            return
        self._num_unknown = 0
        is_right = self._guess[self._num_right] == token_id
        self._note(self._num_right, is_right=is_right)
        self._num_right += 1
        if not is_right or self._num_right == len(self._guess):
            self._guess = ()

    def _forget(self) -> None:
        self._first, self._later = _Rate(0.5), _Rate(0.75)
        self._num_unknown = 0

    def _note(self, place: int, *, is_right: bool) -> None:
        (self._later if place else self._first).note(is_right)


class _Rate:
    def __init__(self, prior: float) -> None:
        self._hits, self._trials = prior * PRIOR_TRIALS, PRIOR_TRIALS

    @property
    def value(self) -> float:
        return self._hits / self._trials

    def note(self, is_hit: bool) -> None:
        self._hits = DECAY * self._hits + is_hit
        self._trials = DECAY * self._trials + 1
