"""Arguments of calls, as vLLM has them: one for all prompts or one for each, how texts are
tokenized, and what of the rest is served here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flexinfer.engine.inputs import InputProcessor
from flexinfer.errors import RequestError
from flexinfer.lora.request import LoRARequest
from flexinfer.runtime.numbers import flag, whole
from flexinfer.types import Prompt

ManyAdapters = LoRARequest | Sequence[LoRARequest | None] | None
Priorities = int | Sequence[int] | None
WITHOUT_EFFECT = ("prompt_text", "session_id", "trace_headers")
"""Which route a request takes, and who is told of it: traces are the server's."""
INSTEAD = {
    "data_parallel_rank": "there is one engine; `flexinfer serve --replicas` runs several",
    "kv_hints": "cache_salt of a prompt and prefix caching decide what is kept",
    "mm_processor_kwargs": "there are no images",
    "reasoning_ended": "structured_outputs holds from the first token on",
    "reasoning_parser_kwargs": "reasoning is told apart by the server: --reasoning-parser",
}
TOKENIZATION = (
    "add_special_tokens",
    "max_length",
    "truncate_prompt_tokens",
    "truncation",
    "truncation_side",
)
UNLESS_ASKED_FOR = ("do_lower_case", "needs_detokenization", "padding", "return_token_offsets")
"""Of vLLM's tokenization_kwargs what may be there to say that it is not wanted."""


def listed_priorities(given: Priorities, num_prompts: int) -> list[int]:
    """One for each prompt. Raises RequestError."""
    if isinstance(given, str) or not isinstance(given or 0, (int, Iterable)):
        raise RequestError(
            f"priority must be a number, or a list of one for each prompt, got {given!r}"
        )
    one = given or 0
    priorities = [one] * num_prompts if isinstance(one, int) else list(one)
    if len(priorities) != num_prompts:
        raise RequestError(f"{num_prompts} prompts but {len(priorities)} priorities")
    return priorities


def listed_adapters(given: ManyAdapters, num_prompts: int) -> list[LoRARequest | None]:
    """One for each prompt. Raises RequestError."""
    adapters = list(given) if isinstance(given, Sequence) else [given] * num_prompts
    if len(adapters) != num_prompts:
        raise RequestError(f"{num_prompts} prompts but {len(adapters)} lora_requests")
    return adapters


def check_call_arguments(given: Mapping[str, Any]) -> None:
    """Raises RequestError, with what to do, for what vLLM's calls have and nobody serves here,
    TypeError for a name that neither knows."""
    for name, value in given.items():
        if name not in WITHOUT_EFFECT and name not in INSTEAD:
            raise TypeError(f"there is no argument {name!r} here: leave it out")
        if name in INSTEAD and value not in (None, {}, 0):
            raise RequestError(f"{name}={value!r} is not served here: {INSTEAD[name]}")


@dataclass(frozen=True)
class Tokenization:
    """What `tokenization_kwargs` of a call say of its prompts."""

    add_special_tokens: bool | None = None
    """None: texts get those of the tokenizer, conversations those of their template."""
    num_kept: int | None = None
    """Tokens of a prompt to keep at most, or None: all. -1: as many as leave room for an answer."""
    side: str | None = None
    """Which tokens go where there are more, the "left" or the "right" ones; None: as the tokenizer
    does it."""

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> Tokenization:
        """From vLLM's names, which are those of transformers. Raises RequestError."""
        if not isinstance(given, (Mapping, type(None))):
            raise RequestError(f"tokenization_kwargs must be a dict, got {given!r}")
        asked = {name: value for name, value in (given or {}).items() if value is not None}
        for name in UNLESS_ASKED_FOR:
            if asked.get(name) in (False, "do_not_pad"):
                del asked[name]
        if unknown := [name for name in asked if name not in TOKENIZATION]:
            raise RequestError(
                f"{unknown[0]!r} of tokenization_kwargs is not supported here; they may have "
                f"{', '.join(TOKENIZATION)}"
            )
        side = asked.get("truncation_side")
        if side not in (None, "left", "right"):
            raise RequestError(f"truncation_side must be 'left' or 'right', got {side!r}")
        try:
            special = asked.get("add_special_tokens")
            if special is not None:
                flag("add_special_tokens", special)
            return cls(special, _num_kept(asked), side)
        except ValueError as error:
            raise RequestError(str(error)) from None

    def tokens_of(self, prompt: Prompt, inputs: InputProcessor) -> Prompt:
        """The same prompt, tokenized. Raises RequestError."""
        if self == Tokenization():
            return prompt
        whole_prompt: Any = {"prompt": prompt} if isinstance(prompt, str) else prompt
        if not isinstance(whole_prompt, Mapping):
            return self.cut(list(whole_prompt), inputs)
        if "prompt_token_ids" in whole_prompt:
            ids = list(whole_prompt["prompt_token_ids"])
        elif "prompt" in whole_prompt:
            special = self.add_special_tokens is not False
            ids = inputs.tokenize(whole_prompt["prompt"], add_special_tokens=special)
        else:
            return prompt
        return {**whole_prompt, "prompt_token_ids": self.cut(ids, inputs)}  # type: ignore[return-value]

    def cut(self, token_ids: list[int], inputs: InputProcessor) -> list[int]:
        """Those that are kept."""
        longest = inputs.max_model_len - 1
        num_kept = longest if self.num_kept == -1 else self.num_kept
        if num_kept is None or len(token_ids) <= num_kept:
            return token_ids
        side = self.side or getattr(inputs.tokenizer, "truncation_side", "right")
        return token_ids[:num_kept] if side == "right" else token_ids[-num_kept:]

    def check_of_chat(self) -> None:
        """Raises RequestError for what a conversation cannot have."""
        if self.add_special_tokens:
            raise RequestError(
                "add_special_tokens of tokenization_kwargs is for plain texts: a chat template "
                "writes special tokens itself"
            )


def _num_kept(asked: Mapping[str, Any]) -> int | None:
    """Raises ValueError."""
    truncation, longest = asked.get("truncation", False), asked.get("max_length")
    if truncation not in (True, False, "longest_first", "do_not_truncate"):
        raise ValueError(
            f"truncation of tokenization_kwargs must be True or False, got {truncation!r}"
        )
    if truncation in (True, "longest_first"):
        return -1 if longest is None else _positive("max_length", longest)
    if longest is not None:
        raise ValueError("max_length of tokenization_kwargs needs truncation=True")
    kept = asked.get("truncate_prompt_tokens")
    return kept if kept in (None, -1) else _positive("truncate_prompt_tokens", kept)


def _positive(name: str, given: Any) -> int:
    if (number := whole(name, given)) < 1:
        raise ValueError(f"{name} must be at least 1 token, got {given!r}")
    return number
