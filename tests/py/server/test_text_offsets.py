"""Where tokens begin in the text of a completion (`text_offset`), streamed or not."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

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
