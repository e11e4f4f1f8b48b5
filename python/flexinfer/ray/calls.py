"""Call: one HTTP request on its way to a replica, and what routers may know of it."""

from __future__ import annotations

import json
from array import array
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Message

from flexinfer.routing.blocks import hash_blocks
from flexinfer.routing.routers import RoutedPrompt

PROMPT_FIELDS = ("tools", "system", "instructions", "prompt", "input", "messages")
"""What decides what the model reads, in the order in which templates write it."""
BYTES_PER_TOKEN = 4
"""About, of text: a router has no tokenizer."""


class ReplicaLostError(Exception):
    """The replica has died, or its engine has; another one may answer."""


@dataclass
class Call:
    scope: dict[str, Any]
    """Of ASGI, without what cannot travel."""
    body: bytes
    prompt: str
    """What the model is to read, about; equal beginnings are equal prefixes. Also for Ray's own
    routers, which look for a field of this name. Never empty."""
    salt: str = ""
    """Prefixes are shared under one salt only."""
    replica: str | None = None
    """The one that has what is asked for, and no other; None: any will do."""
    replicas: tuple[str, ...] = ()
    """All that there were when one was chosen."""
    on_answer: Callable[[], None] = field(default=lambda: None, compare=False)
    """Called when the first of the answer is there. Stays where it is."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "on_answer"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.on_answer = lambda: None

    def routed_prompt(self) -> RoutedPrompt:
        """What a replica keeps goes on from there: the text is no beginning of anything."""
        data = self.prompt.encode("utf-8", "surrogatepass")
        tokens = array("i")
        tokens.frombytes(data[: len(data) // BYTES_PER_TOKEN * BYTES_PER_TOKEN])
        return RoutedPrompt(len(tokens), () if self.replica else hash_blocks(tokens, self.salt))


Forward = Callable[[Call], AsyncGenerator[Message, None]]
"""To a replica. Raises ReplicaLostError."""


def prompt_text(body: Mapping[str, Any]) -> str:
    """Of a request of any endpoint, known or not. A chat that goes on begins as it did before."""
    return "".join(_text_of(body[name]) for name in PROMPT_FIELDS if body.get(name))


def _text_of(value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        return json.dumps(value, sort_keys=True, ensure_ascii=False)
    if all(type(one) is int and 0 <= one < 2**31 for one in value):  # tokens: 4 bytes each, as text
        return array("i", value).tobytes().decode("latin-1")
    return "".join(_text_of(one) for one in value)
