"""History: a conversation as the tokens that the model has seen, and the messages they say.

Invariant: a prompt extends the token ids of the turns before it exactly, so that their KV is
found again. Rendering the messages anew need not do that (an answer cut short, text that
tokenizes differently, a template that rewrites old turns); then only the template's new text is
tokenized and appended. If a template hides old answers, the prompt is rendered anew, and
`num_rewritten` says how often. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from flexinfer.engine.chat_template import template_source, template_traits
from flexinfer.engine.template_messages import template_messages
from flexinfer.types import ChatMessage

_MARK = "FLEXINFERLASTANSWER"


class Format(Protocol):
    """Turns messages into token ids."""

    def render(self, messages: list[ChatMessage]) -> list[int]:
        """The whole prompt, ready for an answer."""
        ...

    def tail(self, messages: list[ChatMessage]) -> list[int] | None:
        """What follows the last answer in the prompt; None if the format cannot tell."""
        ...

    def said(self, token_ids: Sequence[int], text: str) -> str:
        """What a message of the history says of an answer, which was generated as these tokens."""
        ...


class TemplateFormat:
    """The chat template of the model's tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def render(self, messages: list[ChatMessage]) -> list[int]:
        return self._encode(self._text(messages))

    def tail(self, messages: list[ChatMessage]) -> list[int] | None:
        answer: ChatMessage = {"role": "assistant", "content": _MARK}
        marked = [*messages[:-2], answer, messages[-1]]
        _, found, tail = self._text(marked).rpartition(_MARK)
        return self._encode(tail) if found else None

    def said(self, token_ids: Sequence[int], text: str) -> str:
        return text

    def _text(self, messages: list[ChatMessage]) -> str:
        from jinja2 import TemplateError

        try:
            return self._apply(messages)
        except TemplateError:  # no role "system" (Gemma): its text goes before the first message
            if messages[0]["role"] != "system" or len(messages) == 1:
                raise
            first = f"{messages[0]['content']}\n\n{messages[1]['content']}"
            return self._apply([{**messages[1], "content": first}, *messages[2:]])

    def _apply(self, messages: list[ChatMessage]) -> str:
        traits = template_traits(template_source(self._tokenizer))
        text: str = self._tokenizer.apply_chat_template(
            template_messages(messages, traits), tokenize=False, add_generation_prompt=True
        )
        return text

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


class HarmonyFormat(TemplateFormat):
    """gpt-oss: its template has the final message of old turns alone, without the reasoning before
    it, and so all that is behind the last prompt is rendered anew."""

    FINAL = re.compile(
        r"<\|channel\|>final(?:\s*<\|constrain\|>[^<]*)?<\|message\|>"
        r"(.*?)(?=<\|(?:end|return|call|start|channel)\|>|\Z)",
        re.DOTALL,
    )

    def tail(self, messages: list[ChatMessage]) -> list[int] | None:
        return None

    def said(self, token_ids: Sequence[int], text: str) -> str:
        """No mark of it, which the template would refuse, though `text` may have them."""
        marked: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        if "<|channel|>" in marked or "<|message|>" in marked:
            return "\n".join(self.FINAL.findall(marked))
        plain: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return plain


class PlainFormat:
    """For models without a chat template: the messages as text, one after the other."""

    STOP = "\nUser:"

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def render(self, messages: list[ChatMessage]) -> list[int]:
        system = "".join(f"{m['content']}\n" for m in messages if m["role"] == "system")
        talk = [m for m in messages if m["role"] != "system"]
        lines = "".join(f"\n{str(m['role']).capitalize()}: {m['content']}" for m in talk)
        ids: list[int] = self._tokenizer(f"{system}{lines}\nAssistant:".lstrip("\n")).input_ids
        return ids

    def tail(self, messages: list[ChatMessage]) -> list[int] | None:
        text = f"{self.STOP} {messages[-1]['content']}\nAssistant:"
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def said(self, token_ids: Sequence[int], text: str) -> str:
        return text


def choose_format(tokenizer: Any) -> Format:
    """The tokenizer's chat template, or plain text where it has none."""
    template = getattr(tokenizer, "chat_template", None)
    if template is None:
        return PlainFormat(tokenizer)
    return (HarmonyFormat if writes_harmony(str(template)) else TemplateFormat)(tokenizer)


def writes_harmony(template: str) -> bool:
    """It is a chat template of gpt-oss' form."""
    return "<|channel|>" in template and "<|message|>" in template


class History:
    """One conversation: `ask` makes the next prompt, `answer` adds what the model said to it."""

    def __init__(
        self,
        text_format: Format,
        messages: Iterable[ChatMessage] = (),
        end_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`messages`: what was said before. `end_ids`: tokens by which the model ends an answer."""
        self._format = text_format
        self._end_ids = end_ids
        self.messages: list[ChatMessage] = list(messages)
        self.token_ids: list[int] = []
        self.num_new_tokens = 0
        """Tokens of the last prompt that are not in the turns before it."""
        self.num_rewritten = 0
        self._before: list[tuple[int, list[int]]] = []  # messages and tokens before each turn

    def ask(self, text: str) -> list[int]:
        """Token ids of the prompt for a user's message. `answer` or `take_back` comes next."""
        self._before.append((len(self.messages), self.token_ids))
        self.messages.append({"role": "user", "content": text})
        try:
            prompt = self._prompt()
        except BaseException:
            self.take_back()
            raise
        shared = common_prefix(self.token_ids, prompt)
        self.num_new_tokens = len(prompt) - shared
        self.num_rewritten += shared < len(self.token_ids)
        return prompt

    def take_back(self) -> str | None:
        """Forget the last turn, answered or not; returns what the user said, None without turn."""
        if not self._before:
            return None
        num_messages, self.token_ids = self._before.pop()
        said = str(self.messages[num_messages]["content"])
        del self.messages[num_messages:]
        return said

    def answer(self, prompt: Sequence[int], token_ids: Sequence[int], text: str) -> None:
        """Add the model's answer, as the tokens that it generated."""
        said = self._format.said(token_ids, text)
        self.messages.append({"role": "assistant", "content": said})
        self.token_ids = [*prompt, *token_ids]

    def fork(self) -> History:
        """A second conversation with the same past."""
        fork = History(self._format, self.messages, self._end_ids)
        fork.token_ids, fork._before = self.token_ids, list(self._before)
        return fork

    def _prompt(self) -> list[int]:
        rendered = self._format.render(self.messages)
        if rendered[: len(self.token_ids)] == self.token_ids:
            return rendered
        tail = self._format.tail(self.messages)
        if tail is None:
            return rendered
        return [*self.token_ids, *self._without_end(tail)]

    def _without_end(self, tail: list[int]) -> list[int]:
        """`tail` after the token that ends an answer, if the model has said that token itself."""
        if self.token_ids[-1] in self._end_ids:
            for idx, token_id in enumerate(tail[:2]):
                if token_id == self.token_ids[-1]:
                    return tail[idx + 1 :]
        return tail


def system_message(text: str | None) -> list[ChatMessage]:
    """The messages before the first turn; none for None or ''."""
    return [{"role": "system", "content": text}] if text else []


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of tokens that both begin with."""
    for idx, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return idx
    return min(len(first), len(second))
