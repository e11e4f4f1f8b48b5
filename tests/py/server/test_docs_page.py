"""`/docs`: what the server takes, on one page."""

from __future__ import annotations

import asyncio
import re
import threading

import httpx
import pytest

from flexinfer.async_llm import AsyncLLM
from flexinfer.server.app import create_app
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


@pytest.mark.parametrize("path", ["/docs", "/openapi.json"])
def test_the_document_is_made_beside_the_loop(path: str, llm: AsyncLLM) -> None:
    app, made_in = create_app(llm, settings()), []
    document = app.openapi()

    def made() -> dict[str, object]:
        made_in.append(threading.get_ident())
        return document

    app.openapi = made  # type: ignore[method-assign]

    async def visit() -> int:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert (await client.get(path)).is_success
        return threading.get_ident()

    assert made_in != [asyncio.run(visit())]
    assert len(made_in) == 1
