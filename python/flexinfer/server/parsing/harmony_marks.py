"""HarmonyMarks: the tokens that Harmony is written with, in one tokenizer.

What is said here of tokens: where a prompt leaves off, which tokens are reasoning, and the grammars
(Lark's notation, as llguidance has it) of answers that must be of a form. The text between them is
`HarmonyParser`'s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from flexinfer.server.parsing.harmony import ENDS, IN_HEADER, Header

EFFORTS = ("low", "medium", "high")
"""That the models know; how much they think cannot be none."""


class HarmonyMarks:
    def __init__(self, tokenizer: Any | None) -> None:
        """Raises ValueError for a tokenizer without one of the tokens."""
        if tokenizer is None:
            raise ValueError("Harmony needs a tokenizer, and this engine has none")
        self._tokenizer = tokenizer
        vocab = tokenizer.get_vocab()
        missing = [mark for mark in (*IN_HEADER, *ENDS[:3]) if mark not in vocab]
        if missing:
            raise ValueError(
                f"Harmony is written with the token {missing[0]!r}, which the model's tokenizer "
                "does not have: it is the form of gpt-oss"
            )
        self._ids = {mark: vocab[mark] for mark in (*IN_HEADER, *ENDS) if mark in vocab}
        self._end_ids = {self._ids[mark] for mark in ENDS if mark in vocab}

    def opening(self, prompt_ids: Sequence[int]) -> str:
        """The header that a prompt has begun, after its role, up to `<|message|>` if that stands
        there: "" for a prompt as templates make it."""
        start_id, message_id = self._ids["<|start|>"], self._ids["<|message|>"]
        begin = next((i for i in range(len(prompt_ids), 0, -1) if prompt_ids[i - 1] == start_id), 0)
        last = list(prompt_ids[begin:]) if begin else []
        if not self._end_ids.isdisjoint(last):
            return ""
        if message_id in last:
            last = last[: last.index(message_id) + 1]
        text: str = self._tokenizer.decode(last, skip_special_tokens=False)
        return text.removeprefix("assistant")

    def num_reasoning_tokens(self, token_ids: Sequence[int], opening: str) -> int:
        """Of an answer: those of messages that are reasoning, with their marks and headers."""
        num_tokens = begin = 0
        is_heading = not opening.endswith("<|message|>")
        is_reasoning = not is_heading and Header.of(opening).is_reasoning
        start_id, channel_id = self._ids["<|start|>"], self._ids["<|channel|>"]
        for idx, token_id in enumerate(token_ids):
            if token_id == start_id or (token_id == channel_id and not is_heading):
                is_heading, is_reasoning, begin = True, False, idx
            elif token_id == self._ids["<|message|>"] and is_heading:
                text = self._tokenizer.decode(token_ids[begin:idx], skip_special_tokens=False)
                is_heading, is_reasoning = False, Header.of(text).is_reasoning
                num_tokens += is_reasoning * (idx - begin)
            num_tokens += is_reasoning
            if token_id in self._end_ids:
                is_heading, is_reasoning, begin = True, False, idx + 1
        return num_tokens

    def before_answer(self, opening: str, *, is_call: bool) -> str | None:
        """Rules of what comes before a final message, or a call: the rule `before`. None:
        nothing does."""
        is_open = opening.endswith("<|message|>")
        header = Header.of(opening)
        if is_open and not is_call and not header.is_reasoning and header.recipient is None:
            return None
        start, channel, message, end = (
            self._rule(mark) for mark in ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
        )
        first = "rest " if is_open else ""
        final = "" if is_call else f' {channel} "final" {message}'
        return (
            f"before: {first}analysis*{final}\n"
            f'analysis: {channel} "analysis" {message} rest\n'
            f'rest: any {end} {start} "assistant"\n'
            "any: /(.|\\n)*/"
        )

    def call(self, schemas: Mapping[str, Mapping[str, Any]]) -> str:
        """The grammar of a call of one of these functions: name -> schema of its parameters, with
        what llguidance is to know of it."""
        channel, constrain, message = (
            self._rule(mark) for mark in ("<|channel|>", "<|constrain|>", "<|message|>")
        )
        rules = [f"start: {channel} (" + " | ".join(f"call_{i}" for i in range(len(schemas))) + ")"]
        for idx, (name, schema) in enumerate(schemas.items()):
            heading = json.dumps(f"commentary to=functions.{name} ")
            # "::=" in a text of a schema would make EBNF of the whole.
            source = json.dumps(schema).replace("::=", "\\u003a:=")
            rules.append(f'call_{idx}: {heading} {constrain} "json" {message} %json {source}')
        return "\n".join(rules)

    def _rule(self, mark: str) -> str:
        """In Lark: a special token by its id."""
        return f"<[{self._ids[mark]}]>"
