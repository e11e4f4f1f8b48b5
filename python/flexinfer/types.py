"""Types of the public interface that belong to no single module. No dependencies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NotRequired, TypeAlias, TypedDict

FinishReason = Literal["stop", "length", "abort", "error"]
"""Why a completion ended: a stop token or string; a length limit; the caller; a failure."""

CacheLimit = Literal["off", "complete", "not recorded", "window", "state", "memory"]
"""Why no more of a prompt was found in the prefix cache: there is none; all that need not be
computed was found; no more was recorded; more was, but not the rows that a sliding window needs
there any more; more was, but no recurrent state behind it."""


class _PromptOptions(TypedDict, total=False):
    cache_salt: str
    """Prefixes are shared only among prompts with the same salt (tenants never share)."""
    output_token_ids: Sequence[int]
    """An answer that was begun elsewhere: it goes on after these tokens, and repeats their text."""


class TextPrompt(_PromptOptions):
    """A prompt as text, to be tokenized with the model's special tokens."""

    prompt: str


class TokensPrompt(_PromptOptions):
    """A prompt as token ids, used exactly as they are."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    """Their text, for outputs to show."""


Prompt: TypeAlias = "str | Sequence[int] | TextPrompt | TokensPrompt"
ChatMessage = dict[str, object]
Messages = Sequence[ChatMessage]
