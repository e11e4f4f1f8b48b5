"""Where tokens begin in the text of a completion (`text_offset`), streamed or not."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from flexinfer.async_llm import AsyncLLM
from flexinfer.server.api import completion_call
from helpers.serving import serving, settings

COMPLETIONS = "/v1/completions"
TEXT, END = "Zoë 媽 🤗 ab", "<|end|>"
CHOICE = {"structured_outputs": {"choice": [TEXT]}, "temperature": 0, "max_tokens": 40}
"""Characters of it are cut into several tokens."""


def test_offsets_stay_in_the_text(http: httpx.Client) -> None:
    answer = http.post(COMPLETIONS, json={"prompt": "x", "logprobs": 1, **CHOICE}).json()
    choice = answer["choices"][0]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[-1] <= len(TEXT)
    for token, offset in zip(tokens, offsets, strict=True):
        assert token.startswith("bytes:\\x") or (TEXT + END)[offset:].startswith(token)
    assert any(token.startswith("bytes:\\x") for token in tokens)


@pytest.mark.parametrize("more", [{}, {"echo": True}, {"stop": [TEXT + "?"]}, {"stop": TEXT[4:]}])
def test_offsets_of_a_stream_are_those_of_the_whole(
    http: httpx.Client, more: dict[str, Any]
) -> None:
    """They were those of the text shown so far: text that is held back counted for nothing."""
    body = {"prompt": "x", "logprobs": 1, **CHOICE, **more}
    whole = http.post(COMPLETIONS, json=body).json()["choices"][0]["logprobs"]["text_offset"]
    with http.stream("POST", COMPLETIONS, json=body | {"stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    streamed = [json.loads(line)["choices"][0]["logprobs"] for line in lines if line != "[DONE]"]
    assert [offset for one in streamed if one for offset in one["text_offset"]] == whole


@pytest.mark.parametrize("kept", [None, 3])
@pytest.mark.parametrize("as_ids", [False, True])
def test_an_echo_has_the_special_tokens_of_its_prompt(
    http: httpx.Client, as_ids: bool, kept: int | None
) -> None:
    """They counted for offsets alone, which led out of the text."""
    sent: Any = f"one{END}two{END}"
    if as_ids:
        sent = http.post("/tokenize", json={"prompt": sent}).json()["tokens"]
    body = {"prompt": sent, "logprobs": 0, "echo": True, "max_tokens": 0, "temperature": 0}
    body |= {"truncate_prompt_tokens": kept}
    choice = http.post(COMPLETIONS, json=body).json()["choices"][0]
    text, found = choice["text"], choice["logprobs"]
    assert text.count(END) >= (2 if kept is None else 1)
    assert text.startswith("one") is (kept is None)
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert text[offset:].startswith(token)


def test_tokens_that_the_tokenizer_adds_are_not_in_the_echo(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = llm.get_tokenizer().convert_tokens_to_ids(END)
    real = completion_call.tokenize

    async def with_a_first_token(state: Any, text: str, *, special_tokens: bool) -> list[int]:
        return [end] * special_tokens + await real(state, text, special_tokens=special_tokens)

    monkeypatch.setattr(completion_call, "tokenize", with_a_first_token)
    body = {"prompt": "one two", "logprobs": 0, "echo": True, "max_tokens": 2, "temperature": 0}
    body |= {"skip_special_tokens": False}
    with serving(llm, settings()) as url:
        choice = httpx.post(url + COMPLETIONS, json=body, timeout=60).json()["choices"][0]
    text, found = choice["text"], choice["logprobs"]
    assert text.startswith("one two")
    assert (found["tokens"][0], found["text_offset"][:2]) == (END, [0, 0])
    for token, offset in list(zip(found["tokens"], found["text_offset"], strict=True))[1:]:
        assert text[offset:].startswith(token)
