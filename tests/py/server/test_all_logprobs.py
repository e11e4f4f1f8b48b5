"""Log probabilities of all tokens, which -1 asks for, and defaults that clients send along."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from flexinfer.async_llm import AsyncLLM
from helpers.serving import serving, settings

CHAT: Any = {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 2}
TEXT: Any = {"prompt": "one two", "max_tokens": 2}
ENDPOINTS = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT}


@pytest.fixture(scope="module")
def roomy(llm: AsyncLLM) -> Iterator[str]:
    with serving(llm, settings(max_logprobs=llm.inputs.vocab_size)) as url:
        yield url


def ask(url: str, endpoint: str, **fields: Any) -> Any:
    body = {**ENDPOINTS[endpoint], "temperature": 0, **fields}
    answer = httpx.post(url + endpoint, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["logprobs"], answer.json()


def test_all_tokens_are_told_of(roomy: str, llm: AsyncLLM) -> None:
    size = llm.inputs.vocab_size
    found, whole = ask(
        roomy, "/v1/chat/completions", logprobs=True, top_logprobs=-1, prompt_logprobs=-1
    )
    for entry in found["content"]:
        assert len(entry["top_logprobs"]) == size
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]
    assert [len(entry) for entry in whole["prompt_logprobs"][1:]] == [size] * (
        len(whole["prompt_logprobs"]) - 1
    )
    found, whole = ask(roomy, "/v1/completions", logprobs=-1, echo=True)
    assert found["top_logprobs"][0] is None
    assert min(len(entry) for entry in found["top_logprobs"][1:]) > 0.8 * size  # some share a text


@pytest.mark.parametrize(
    ("endpoint", "fields", "param"),
    [
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ("/v1/chat/completions", {"prompt_logprobs": -1}, "prompt_logprobs"),
        ("/v1/completions", {"logprobs": -1}, "logprobs"),
        ("/v1/completions", {"prompt_logprobs": -1}, "prompt_logprobs"),
    ],
)
def test_a_limit_below_all_is_named(
    http: httpx.Client, llm: AsyncLLM, endpoint: str, fields: dict[str, Any], param: str
) -> None:
    answer = http.post(endpoint, json=ENDPOINTS[endpoint] | fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert (
        "at most 20 log probabilities per token (the server's --max-logprobs)" in error["message"]
    )
    assert error["message"].endswith(f"got -1, which is all {llm.inputs.vocab_size}")


@pytest.mark.parametrize("logprobs", [False, None])
def test_no_top_logprobs_need_no_logprobs(roomy: str, logprobs: bool | None) -> None:
    found, _ = ask(roomy, "/v1/chat/completions", logprobs=logprobs, top_logprobs=0)
    assert found is None


def test_all_top_logprobs_need_logprobs(roomy: str) -> None:
    body = {**CHAT, "top_logprobs": -1}
    answer = httpx.post(roomy + "/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "top_logprobs needs logprobs"
