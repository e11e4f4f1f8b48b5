"""`/docs`: what the server takes, on one page."""

from __future__ import annotations

import re

import httpx

from flexinfer.async_llm import AsyncLLM
from helpers.serving import serving, settings


def test_every_endpoint_and_field_is_on_the_page(http: httpx.Client) -> None:
    answer = http.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    document = http.get("/openapi.json").json()
    assert answer.text.count("<details>") == sum(map(len, document["paths"].values()))
    assert all(f"<code>{path}</code>" in answer.text for path in document["paths"])
    for field in ("max_completion_tokens", "structured_outputs", "previous_response_id", "items"):
        assert f"<td><code>{field}</code></td>" in answer.text
    assert "list of Message, needed" in answer.text


def test_nothing_comes_from_other_hosts(http: httpx.Client) -> None:
    page = http.get("/docs")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert not re.search(r"(?:src|href)=.(?:https?:)?//", page.text)


def test_the_page_needs_no_key(llm: AsyncLLM) -> None:
    with serving(llm, settings(api_keys=("a",))) as url:
        assert httpx.get(f"{url}/docs", timeout=60).status_code == 200
