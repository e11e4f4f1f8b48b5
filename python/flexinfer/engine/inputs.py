"""Inputs: from what a caller passes (text, tokens, messages) to checked token ids. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

from flexinfer.engine.chat_template import template_source, template_traits
from flexinfer.engine.template_messages import template_messages
from flexinfer.errors import RequestError, UnsupportedModelError
from flexinfer.lora.adapters import SALT_PREFIX
from flexinfer.runtime.numbers import whole
from flexinfer.runtime.reasons import reason_of
from flexinfer.types import Messages, Prompt, TokensPrompt

NOT_SERVED = ("multi_modal_data", "mm_processor_kwargs", "prompt_embeds", "encoder_prompt")
"""What prompts of vLLM may have beside their text, or in its place."""


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    text: str | None
    token_ids: list[int]
    cache_salt: str = ""
    output_token_ids: list[int] = field(default_factory=list)
    """Of an answer that was begun elsewhere."""


class InputProcessor:
    """Tokenizes and checks prompts. `tokenizer` may be None: then prompts are token ids."""

    def __init__(self, tokenizer: Any | None, vocab_size: int, max_model_len: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        pieces = () if tokenizer is None else tokenizer.get_vocab()
        self.max_chars = max_model_len * max(map(len, pieces), default=1)
        """No text that is longer fits into the context."""

    def parse(self, prompt: Prompt) -> ParsedPrompt:
        """Raises RequestError for what is not a prompt, is empty, or leaves no room for output."""
        if isinstance(prompt, Mapping):
            return self._parse_mapping(prompt)
        if isinstance(prompt, str):
            return ParsedPrompt(prompt, self._tokenize(prompt))
        return ParsedPrompt(None, self._check_ids(prompt))

    def chat_prompt(
        self, messages: Messages, chat_template: str | None = None, **kwargs: Any
    ) -> TokensPrompt:
        """A conversation as text and token ids, by the tokenizer's chat template or the one given;
        `kwargs` as for `render`. Raises RequestError."""
        try:
            text = self.render(messages, chat_template, **kwargs)
        except RequestError:
            raise
        except Exception as error:  # of any kind: a template is a program
            raise RequestError(
                f"the chat template cannot render this conversation: {error}"
            ) from error
        return {"prompt": text, "prompt_token_ids": self.tokenize_rendered(text)}

    def check_template_kwargs(self, kwargs: Mapping[str, Any] | None) -> None:
        """Raises RequestError for names that the template would not see: those of arguments."""
        if not isinstance(kwargs, (Mapping, type(None))):
            raise RequestError(f"chat_template_kwargs must be a dict, got {kwargs!r}")
        of_tokenizer = signature(self._require_tokenizer("chat").apply_chat_template).parameters
        reserved = of_tokenizer.keys() | signature(type(self).render).parameters.keys()
        clash = sorted(reserved & (kwargs or {}).keys())
        if clash:
            raise RequestError(
                f"chat_template_kwargs are for the template, and may not set {clash[0]!r}"
            )

    def use_chat_template(self, template: str) -> None:
        """In place of the tokenizer's, which stays as it is: it may be the caller's. Raises
        RequestError where there is none."""
        self.tokenizer = copy(self._require_tokenizer("chat_template"))
        self.tokenizer.chat_template = template

    def tokenize_rendered(self, text: str) -> list[int]:
        """Token ids of a text that the template made: it has its special tokens already. Raises
        RequestError."""
        tokenizer = self._require_tokenizer("chat")
        _check_characters(text)
        ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def render(
        self,
        messages: Messages,
        chat_template: str | None = None,
        *,
        chat_template_content_format: str = "auto",
        **kwargs: Any,
    ) -> str:
        """What the model reads of a conversation, as text. `chat_template_content_format`: how the
        template takes the content of messages ("string", "openai"), if that is not to be read off
        it ("auto"). Raises RequestError, and whatever the template raises."""
        tokenizer = self._require_tokenizer("chat")
        if chat_template is None and getattr(tokenizer, "chat_template", None) is None:
            raise RequestError(
                "the model's tokenizer has no chat template: give one (chat_template=, or "
                "--chat-template of flexinfer serve), or use plain prompts"
            )
        source = template_source(tokenizer, chat_template, kwargs.get("tools"))
        traits = template_traits(source, chat_template_content_format)
        text: str = tokenizer.apply_chat_template(
            template_messages(messages, traits),
            chat_template=chat_template,
            tokenize=False,
            **kwargs,
        )
        return text

    def _parse_mapping(self, prompt: Mapping[str, Any]) -> ParsedPrompt:
        salt = prompt.get("cache_salt") or ""
        if not isinstance(salt, str):
            raise RequestError(f"cache_salt must be a string, got {salt!r}")
        if salt.startswith(SALT_PREFIX):
            raise RequestError(f"cache_salt {salt!r} begins as those of LoRA adapters do")
        for name in NOT_SERVED:
            given = prompt.get(name)
            if given is not None and not (isinstance(given, Mapping) and not given):
                raise RequestError(f"{name!r} of a prompt is not supported here: it is text alone")
        given = prompt.get("output_token_ids")
        output_ids = self._check_ids(given, "output_token_ids") if given else []
        if "prompt_token_ids" in prompt:
            text = prompt.get("prompt")
            if not isinstance(text, (str, type(None))):
                raise RequestError(f"the text of a prompt must be a string, got {text!r}")
            return ParsedPrompt(text, self._check_ids(prompt["prompt_token_ids"]), salt, output_ids)
        if "prompt" in prompt:
            ids = self._tokenize(prompt["prompt"])
            return ParsedPrompt(prompt["prompt"], ids, salt, output_ids)
        raise RequestError(
            f"a prompt needs 'prompt' or 'prompt_token_ids', got the keys {[*prompt]}"
        )

    def tokenize(self, text: Any, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, of any number. Raises RequestError."""
        if not isinstance(text, str):
            raise RequestError(f"the text of a prompt must be a string, got {text!r}")
        tokenizer = self._require_tokenizer("a prompt as text")
        _check_characters(text)
        ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens).input_ids
        return ids

    def _tokenize(self, text: Any) -> list[int]:
        return self._check_ids(self.tokenize(text))

    def _check_ids(self, token_ids: Any, what: str = "a prompt") -> list[int]:
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        if isinstance(ids, (str, bytes)) or not isinstance(ids, Sequence):
            raise RequestError(f"{what} must be text or token ids, got {token_ids!r}")
        if not ids:
            raise RequestError("the prompt is empty")
        try:
            ids = [i if type(i) is int else whole(f"each token id of {what}", i) for i in ids]
        except ValueError as error:
            raise RequestError(str(error)) from None
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(f"token id {token_id} is not in [0, {self.vocab_size})")
        if len(ids) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, but max_model_len is "
                f"{self.max_model_len}, prompt and output together"
            )
        return ids

    def _require_tokenizer(self, what: str) -> Any:
        if self.tokenizer is None:
            raise RequestError(f"{what} needs a tokenizer, and this engine has none")
        return self.tokenizer


def read_chat_template(given: str | os.PathLike[str] | None) -> str | None:
    """A file, or the text itself. Raises ValueError for a file that cannot be read."""
    if given is None or (isinstance(given, str) and "{" in given):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the chat template {os.fspath(given)!r}: {reason_of(error)}") from None


def _check_characters(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"a text has half a surrogate pair ({text[error.start]!r}) at character {error.start}: "
            "no tokenizer reads that"
        ) from None


def is_single_prompt(prompts: Any) -> bool:
    """Whether `prompts` is one prompt rather than a sequence of them."""
    if isinstance(prompts, (str, Mapping)):
        return True
    if hasattr(prompts, "ndim"):
        return bool(prompts.ndim <= 1)
    if not isinstance(prompts, Sequence) or not prompts:
        return False
    return hasattr(prompts[0], "__index__") and not getattr(prompts[0], "ndim", 0)


def listed_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    many: Any = [prompts] if is_single_prompt(prompts) else prompts
    if not isinstance(many, Iterable):
        raise RequestError(f"prompts must be one or several, got {prompts!r}")
    return list(many)


def listed_conversations(messages: Any) -> list[Messages]:
    """One conversation (a sequence of messages) or several -> several."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Iterable):
        raise RequestError(f"a conversation is a list of messages, got {messages!r}")
    messages = list(messages)
    if not messages:
        raise RequestError("the conversation is empty")
    conversations = [messages] if isinstance(messages[0], Mapping) else messages
    for one in conversations:
        if isinstance(one, (str, Mapping)) or not isinstance(one, Sequence):
            raise RequestError(f"a conversation is a list of messages, got {one!r}")
        if not one:
            raise RequestError("a conversation is empty")
    return list(conversations)


def load_tokenizer(tokenizer: Any, model: Any) -> Any:
    """The tokenizer of a path or hub id, or the one given; None for a model that names none."""
    source = tokenizer if tokenizer is not None else model
    if not isinstance(source, (str, os.PathLike)):
        return tokenizer
    from transformers import AutoTokenizer

    from flexinfer.checkpoints.folder import TOKENIZER_FILES, check_folder, check_json
    from flexinfer.checkpoints.gguf.hub import gguf_file
    from flexinfer.checkpoints.gguf.tokenizer import load_gguf_tokenizer

    name = os.fspath(source)
    file = gguf_file(name)
    if file is None:
        check_folder("tokenizer", name)
    try:
        if file is not None:
            loaded = load_gguf_tokenizer(file)
        else:
            loaded = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        loaded("a")  # some of what is wrong in its files shows only now
    except Exception as error:
        check_json(name, TOKENIZER_FILES)
        raise UnsupportedModelError(
            f"no tokenizer can be loaded from {name!r} ({error}); pass tokenizer=..., or "
            "skip_tokenizer_init=True to work with token ids"
        ) from error
    # It would warn of texts longer than the model's context; we refuse these, and say so.
    loaded.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return loaded
