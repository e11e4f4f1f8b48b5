"""`POST /tokenize` and `/detokenize`, as vLLM has them."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter

from flexinfer.server.api.prompts import tokenize as tokenize_text
from flexinfer.server.chat_renderer import ChatPrompt
from flexinfer.server.http.errors import bad_request
from flexinfer.server.http.json_route import JsonRoute
from flexinfer.server.protocol.others import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
    TokenizerInfo,
)
from flexinfer.server.state import State

SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")

router = APIRouter(tags=["tokens"], route_class=JsonRoute)


@router.post("/tokenize")
async def tokenize(state: State, body: TokenizeRequest) -> TokenizeAnswer:
    """Token ids of a text, or of a chat as the model would read it."""
    state.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    if body.messages is not None:
        continues = bool(body.continue_final_message)
        ids = await state.chat.render(
            ChatPrompt(
                body.messages,
                body.tools or (),
                add_generation_prompt=not continues
                if body.add_generation_prompt is None
                else body.add_generation_prompt,
                continue_final_message=continues,
                documents=body.documents,
                template_kwargs=body.chat_template_kwargs or {},
            )
        )
    else:
        special = body.add_special_tokens is not False
        ids = await tokenize_text(state, body.prompt or "", special_tokens=special)
    strings = None
    if body.return_token_strs and state.llm.tokenizer is not None:
        strings = [str(token) for token in state.llm.tokenizer.convert_ids_to_tokens(ids)]
    return TokenizeAnswer(
        count=len(ids), max_model_len=state.llm.max_model_len, tokens=ids, token_strs=strings
    )


@router.get("/tokenizer_info")
async def tokenizer_info(state: State) -> TokenizerInfo:
    """What the tokenizer is, and the chat template in use."""
    tokenizer = state.llm.tokenizer
    if tokenizer is None:
        raise bad_request("this model has no tokenizer")
    template = state.settings.chat_template or getattr(tokenizer, "chat_template", None)
    return TokenizerInfo(
        tokenizer_class=type(tokenizer).__name__,
        vocab_size=len(tokenizer),
        model_max_length=state.llm.max_model_len,
        chat_template=None if template is None else str(template),
        **{
            name: str(token)
            for name, token in tokenizer.special_tokens_map.items()
            if name in SPECIAL
        },
    )


@router.post("/detokenize")
async def detokenize(state: State, body: DetokenizeRequest) -> DetokenizeAnswer:
    """The text of token ids, special tokens included."""
    state.check_model(body.model)
    tokenizer, vocab_size = state.llm.tokenizer, state.llm.inputs.vocab_size
    if tokenizer is None:
        raise bad_request("this model has no tokenizer")
    unknown = next((one for one in body.tokens if one >= vocab_size), None)
    if unknown is not None:
        raise bad_request(f"token id {unknown} is not in [0, {vocab_size})", "tokens")
    return DetokenizeAnswer(prompt=await asyncio.to_thread(tokenizer.decode, body.tokens))
