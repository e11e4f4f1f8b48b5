"""RollCall: a question to all replicas, each of which answers in time, or is named as silent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

Answer = TypeVar("Answer")
AskAll = Callable[..., Awaitable[Sequence[Awaitable[tuple[str, Any]]]]]
"""`ask(method, *arguments)` of all replicas; each answers with its name and what the method gives,
raises, or hangs."""


class Heard(NamedTuple, Generic[Answer]):
    answers: Mapping[str, Answer]
    silent: Sequence[str]


class RollCall:
    """Knows who has answered before, so that one that does not can be named. For one event loop."""

    def __init__(self, ask: AskAll) -> None:
        self._ask = ask
        self._names: dict[str, None] = {}  # of who has answered, the latest last

    async def ask(self, timeout_s: float, method: str, *arguments: Any) -> Heard[Any]:
        """By the replica's name what those say that answer in time, and the names of the others.
        Raises TimeoutError where it cannot even be known how many there are."""
        asked = await asyncio.wait_for(self._ask(method, *arguments), timeout_s)
        answers = [asyncio.ensure_future(answer) for answer in asked]
        try:
            done, _ = await asyncio.wait(answers, timeout=timeout_s) if answers else ((), ())
        finally:
            for answer in answers:
                answer.cancel()
        heard = dict(one.result() for one in answers if one in done and one.exception() is None)
        silent = self._silent(heard, len(answers) - len(heard))
        self._names = dict.fromkeys((*silent, *heard))
        return Heard(heard, silent)

    def _silent(self, heard: Mapping[str, Any], count: int) -> list[str]:
        """Names of so many that did not answer: of those that answered last, if they ever did."""
        known = [name for name in self._names if name not in heard]
        missing = known[len(known) - min(count, len(known)) :]
        return missing + [f"unknown-{i}" for i in range(count - len(missing))]
