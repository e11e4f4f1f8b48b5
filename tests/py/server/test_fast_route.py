"""The short way of a request to its endpoint answers as FastAPI's does, which is the reference.

`application/json` goes the short way, other kinds of JSON FastAPI's.
"""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import pytest

from helpers.serving import MODEL

DIRECT, REFERENCE = "application/json; charset=utf-8", "application/vnd.api+json"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def both(http: httpx.Client, path: str, body: bytes) -> tuple[httpx.Response, httpx.Response]:
    direct, reference = (
        http.post(path, content=body, headers={"Content-Type": kind})
        for kind in (DIRECT, REFERENCE)
    )
    return direct, reference


def without_ids(text: str) -> Any:
    """The answer, but for what differs from one request to the next."""
    answer = json.loads(text)
    for name in ("id", "created"):
        answer.pop(name)
    answer["usage"].pop("prompt_tokens_details")
    return answer


VALID: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "Once", "max_tokens": 5, "logprobs": 2, "echo": True}),
    (COMPLETIONS, {"prompt": [5, 6, 7], "max_tokens": 3, "n": 2, "seed": 3}),
    (COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 2, "return_token_ids": True}),
    (COMPLETIONS, {"prompt": [[5, 6], [7]], "max_tokens": 2, "unknown_field": [1, {}]}),
    (COMPLETIONS, {"prompt": "Once", "use_beam_search": True, "n": 2, "max_tokens": 3}),
    (CHAT, {"messages": [{"role": "user", "content": "Hi \u2603"}], "max_tokens": 4}),
    (CHAT, {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "max_tokens": 2}),
]


@pytest.mark.parametrize(("path", "body"), VALID)
def test_answers_are_those_of_fastapi(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    text = json.dumps({"model": MODEL, "temperature": 0.0, **body}).encode()
    direct, reference = both(http, path, text)
    assert direct.status_code == reference.status_code == 200, direct.text
    assert direct.headers["content-type"] == reference.headers["content-type"]
    assert without_ids(direct.text) == without_ids(reference.text)


INVALID: list[tuple[str, bytes]] = [
    (COMPLETIONS, b""),
    (COMPLETIONS, b"{"),
    (COMPLETIONS, b'{"prompt": "\xff"}'),
    (COMPLETIONS, b"[1, 2]"),
    (COMPLETIONS, b"{}"),
    (COMPLETIONS, b'{"prompt": 5}'),
    (COMPLETIONS, b'{"prompt": [1, "a"]}'),
    (COMPLETIONS, b'{"prompt": [[1], [2, -1]]}'),
    (COMPLETIONS, b'{"prompt": "a", "max_tokens": "5"}'),
    (COMPLETIONS, b'{"prompt": "a", "model": "gpt-9"}'),
    (COMPLETIONS, b'{"prompt": "a", "temperature": -1}'),
    (COMPLETIONS, b'{"prompt": "a", "temperature": NaN}'),
    (CHAT, b'{"messages": []}'),
    (CHAT, b'{"messages": [{"role": "user", "content": 5}]}'),
    (CHAT, b'{"messages": [{"role": "nobody", "content": "a"}]}'),
    (CHAT, b'{"messages": [{"role": "user", "content": "a"}], "top_logprobs": 3}'),
]


@pytest.mark.parametrize(("path", "body"), INVALID)
def test_errors_are_those_of_fastapi(http: httpx.Client, path: str, body: bytes) -> None:
    direct, reference = both(http, path, body)
    assert 400 <= direct.status_code == reference.status_code < 500, direct.text
    found, expected = direct.json()["error"], reference.json()["error"]
    assert found["message"]
    assert (found["type"], found["param"]) == (expected["type"], expected["param"])


def test_fields_of_random_types_are_refused_alike(http: httpx.Client) -> None:
    draw = random.Random(5)
    values = [None, True, 0, -1, 1.5, "x", [], [1], {}, {"a": 1}, 10**30]
    names = ["prompt", "max_tokens", "n", "stop", "stream", "logit_bias", "seed", "echo", "top_k"]
    for _ in range(40):
        body: dict[str, Any] = {"prompt": "a", "max_tokens": 1}
        body |= {name: draw.choice(values) for name in draw.sample(names, 3)}
        direct, reference = both(http, COMPLETIONS, json.dumps(body).encode())
        assert direct.status_code == reference.status_code, (body, direct.text, reference.text)
        if direct.status_code == 400:
            found, expected = direct.json()["error"], reference.json()["error"]
            assert found["param"] == expected["param"], (body, found, expected)


def test_other_methods_and_paths_are_fastapis(http: httpx.Client) -> None:
    answer = http.put(COMPLETIONS, json={})
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert http.post(f"{COMPLETIONS}/more", json={}).status_code == 404
