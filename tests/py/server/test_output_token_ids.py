"""An answer goes on after tokens that it is given as if it had never been interrupted."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

BASE: dict[str, Any] = {"prompt": "Hello, my name", "max_tokens": 12, "return_token_ids": True}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.5, "seed": 7},
    "penalties": {"temperature": 1.0, "seed": 1, "presence_penalty": 1.5, "repetition_penalty": 2},
    "min_tokens": {"temperature": 1.5, "seed": 3, "min_tokens": 8},
    "regex": {"temperature": 1.0, "seed": 3, "structured_outputs": {"regex": "[a-f]{3,30}"}},
}


def ask(http: httpx.Client, path: str = "/v1/completions", **fields: Any) -> dict[str, Any]:
    answer = http.post(path, json={**BASE, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize("way", WAYS)
def test_it_goes_on_as_if_never_interrupted(way: str, http: httpx.Client) -> None:
    whole = ask(http, **WAYS[way])
    ids = whole["choices"][0]["token_ids"]
    assert len(ids) > 3
    for num_given in (1, len(ids) // 2, len(ids) - 1, len(ids)):
        resumed = ask(http, **WAYS[way], output_token_ids=ids[:num_given])
        assert resumed["choices"] == whole["choices"], num_given
        assert resumed["usage"]["completion_tokens"] == len(ids)
        assert resumed["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


def test_a_stop_string_may_begin_in_what_is_given(http: httpx.Client) -> None:
    ids = ask(http, temperature=0)["choices"][0]["token_ids"]
    texts = [
        ask(http, temperature=0, max_tokens=n)["choices"][0]["text"] for n in range(1, len(ids))
    ]
    stop = texts[6][len(texts[4]) - 1 :]  # from the fifth token into the seventh
    whole = ask(http, temperature=0, stop=stop)
    assert whole["choices"][0]["finish_reason"] == "stop"
    for num_given in range(1, len(whole["choices"][0]["token_ids"])):
        resumed = ask(http, temperature=0, stop=stop, output_token_ids=ids[:num_given])
        assert resumed["choices"] == whole["choices"]


def test_a_chat_goes_on(http: httpx.Client) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "prompt": None}
    whole = ask(http, "/v1/chat/completions", **chat)["choices"][0]
    given = whole["token_ids"][:4]
    resumed = ask(http, "/v1/chat/completions", **chat, output_token_ids=given)["choices"][0]
    assert resumed == whole


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"n": 2}, "one sample"),
        ({"logprobs": 1}, "without logprobs"),
        ({"use_beam_search": True, "n": 2}, "beam search"),
        ({"prompt": ["a", "b"]}, "one prompt"),
        ({"max_tokens": 2}, "after their end"),
        ({"output_token_ids": [2**30]}, "not in"),
        ({"guided_json": {"type": "object"}}, "output_token_ids[0] is 5, which json does not"),
    ],
)
def test_what_cannot_be_exact_is_refused(
    fields: dict[str, Any], said: str, http: httpx.Client
) -> None:
    answer = http.post("/v1/completions", json={**BASE, "output_token_ids": [5, 6, 7], **fields})
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
