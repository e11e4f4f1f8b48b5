"""AnswerStream: the events of one streamed answer, which goes on elsewhere when its replica dies.

The replica is asked for the ids of tokens, which are taken out of the events again. The next one is
given them with the same request (`output_token_ids`): it computes them like a prompt, and repeats
their text, of which as much is left out as was sent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flexinfer.server.http.streaming import event

PATHS = ("/v1/completions", "/v1/chat/completions")
NOT_PLAIN = (
    *("logprobs", "top_logprobs", "prompt_logprobs", "echo", "tools", "use_beam_search"),
    *("best_of", "output_token_ids"),
)
"""Fields with which an answer is more than the text of its tokens."""


class AnswerStream:
    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.can_go_on = True
        """Nothing but text has been sent."""
        self.is_complete = False
        """All has been sent, but for the end of the connection."""
        self._fields = fields
        self._shows_ids = bool(fields.get("return_token_ids"))
        self._token_ids: list[int] = []
        self._num_chars = 0
        self._head: dict[str, Any] = {}
        self._has_role = self._has_end = False
        # Of a replica that repeats what was sent:
        self._num_old_ids = 0
        self._num_old_chars = 0

    @staticmethod
    def of(path: str, fields: Mapping[str, Any]) -> AnswerStream | None:
        """None: not a stream, or one of which no other replica can tell where it stopped."""
        prompt = fields.get("prompt")
        is_single = not isinstance(prompt, list) or all(type(one) is int for one in prompt)
        if path not in PATHS or not fields.get("stream") or not is_single:
            return None
        if fields.get("n") not in (None, 1) or any(fields.get(name) for name in NOT_PLAIN):
            return None
        return AnswerStream(fields)

    def request_body(self) -> bytes:
        """What to send to the first replica, and to the next."""
        self._num_old_ids, self._num_old_chars = len(self._token_ids), self._num_chars
        fields = {**self._fields, "return_token_ids": True}
        if self._token_ids:
            fields["output_token_ids"] = self._token_ids
        return json.dumps(fields).encode()

    def forward(self, text: bytes) -> bytes:
        """The caller's part of whole events."""
        if not text:
            return b""
        events = text.decode().removesuffix("\n\n").split("\n\n")
        return "".join(self._read(one) for one in events).encode()

    def _read(self, one: str) -> str:
        data = one.removeprefix("data: ")
        if data == "[DONE]":
            self.is_complete = True
            return f"{one}\n\n"
        body = json.loads(data)
        if "error" in body:
            return f"{one}\n\n"
        self._head = self._head or {name: body[name] for name in ("id", "created")}
        body.update(self._head)
        is_shown = True
        for choice in body["choices"]:  # one, or none in the event with the usage
            is_shown = self._note(choice)
        return event(body) if is_shown else ""

    def _note(self, choice: dict[str, Any]) -> bool:
        """Whether anything of the choice is for the caller; what is not is taken out."""
        self._note_ids(choice)
        delta = choice.get("delta", choice)
        name = "text" if delta is choice else "content"
        if delta is not choice:
            if "role" in delta:
                is_first, self._has_role = not self._has_role, True
                return is_first
            self.can_go_on &= set(delta) <= {"content"}
        text = delta.get(name) or ""
        num_old = min(self._num_old_chars, len(text))
        self._num_old_chars -= num_old
        self._num_chars += len(text) - num_old
        if name in delta:
            delta[name] = text[num_old:]
        if choice.get("finish_reason") is not None:
            is_first, self._has_end = not self._has_end, True
            return is_first
        return bool(text[num_old:] or choice.get("token_ids"))

    def _note_ids(self, choice: dict[str, Any]) -> None:
        ids = choice.pop("token_ids", None) or []
        num_old = min(self._num_old_ids, len(ids))
        self._num_old_ids -= num_old
        self._token_ids += ids[num_old:]
        if self._shows_ids:
            choice["token_ids"] = ids[num_old:]
        else:
            choice.pop("prompt_token_ids", None)
