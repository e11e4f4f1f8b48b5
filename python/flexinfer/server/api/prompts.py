"""Prompts of the engine, with the tenant's salt, checked for length before they are queued."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from flexinfer.server.chat_renderer import check_length
from flexinfer.server.http.auth import tenant_salt
from flexinfer.server.http.errors import bad_request
from flexinfer.server.protocol.sampling import SamplingFields
from flexinfer.server.state import ServerState
from flexinfer.types import TokensPrompt


async def tokenize(state: ServerState, text: str, *, special_tokens: bool = True) -> list[int]:
    """Token ids of a text; runs in a thread. Raises APIError without tokenizer, or for what cannot
    fit into the context."""
    tokenizer = state.llm.tokenizer
    if tokenizer is None:
        raise bad_request("this model has no tokenizer: send token ids", "prompt")

    check_length(text, state.llm.inputs, "prompt")

    def encode() -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=special_tokens).input_ids
        return ids

    return await asyncio.to_thread(encode)


def decode(state: ServerState, token_ids: Sequence[int], *, special_tokens: bool = False) -> str:
    """The text of tokens, with special ones or without. Raises APIError without tokenizer."""
    tokenizer = state.llm.tokenizer
    if tokenizer is None:
        raise bad_request("text needs a tokenizer, and this model has none")
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=not special_tokens)
    return text


def truncated(
    state: ServerState, fields: SamplingFields, token_ids: list[int], max_tokens: int | None
) -> list[int]:
    """What `truncate_prompt_tokens` keeps of a prompt."""
    num_kept = fields.truncate_prompt_tokens
    if num_kept is None:
        return token_ids
    if num_kept == -1:
        longest = state.llm.max_model_len
        num_kept = longest - min(max_tokens or 1, longest - 1)
        num_kept = min(num_kept, state.settings.max_prompt_tokens or num_kept)
    return token_ids[:num_kept] if fields.truncation_side == "right" else token_ids[-num_kept:]


def make_prompt(
    state: ServerState,
    token_ids: Sequence[int],
    tenant: str,
    cache_salt: str | None,
    *,
    max_tokens: int | None,
    param: str,
    fields: SamplingFields,
) -> TokensPrompt:
    """Raises APIError for a prompt that is empty, or too long for the model or this server."""
    num_tokens, longest = len(token_ids), state.llm.max_model_len
    if not num_tokens:
        raise bad_request("the prompt is empty", param)
    limit = state.settings.max_prompt_tokens
    if limit is not None and num_tokens > limit:
        raise bad_request(
            f"This model's maximum context length is {limit} tokens of prompt on this server "
            f"(--max-prompt-tokens). However, this prompt has {num_tokens}: shorten it.",
            param,
            "context_length_exceeded",
        )
    if num_tokens + (max_tokens or 1) > longest:
        raise bad_request(
            f"This model's maximum context length is {longest} tokens. However, you requested "
            f"{num_tokens + (max_tokens or 1)} tokens ({num_tokens} in the prompt, "
            f"{max_tokens or 'at least 1'} in the completion). Please reduce the length of the "
            "prompt or completion.",
            param,
            "context_length_exceeded",
        )
    prompt: TokensPrompt = {
        "prompt_token_ids": token_ids,
        "cache_salt": tenant_salt(tenant, cache_salt),
    }
    if fields.output_token_ids:
        prompt["output_token_ids"] = fields.output_token_ids
    return prompt
