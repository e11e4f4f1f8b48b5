"""Options that lines for `vllm serve` have: defaults for templates, forced usage, paths of proxies,
sockets with a path."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from flexinfer.async_llm import AsyncLLM
from flexinfer.server.app import create_app
from helpers.serving import MODEL, ServerProcess, serving, settings

TEMPLATE = "{{ mood }}{% if tone is defined %}{{ tone }}{% endif %}{{ messages[-1]['content'] }}"
HELLO = {"role": "user", "content": "hello"}
CHAT = {"model": MODEL, "messages": [HELLO], "max_tokens": 3, "temperature": 0}


@pytest.fixture(scope="module")
def http(llm: AsyncLLM) -> Iterator[httpx.Client]:
    given = settings(
        chat_template=TEMPLATE,
        default_chat_template_kwargs={"mood": "glad", "tone": "low"},
        enable_force_include_usage=True,
        root_path="/llm/",
        api_keys=("secret",),
    )
    headers = {"Authorization": "Bearer secret"}
    with (
        serving(llm, given) as url,
        httpx.Client(base_url=url, timeout=60, headers=headers) as client,
    ):
        yield client


def num_tokens(http: httpx.Client, text: str) -> int:
    body = {"model": MODEL, "prompt": text, "add_special_tokens": False}
    return int(http.post("/tokenize", json=body).json()["count"])


def test_templates_get_defaults_that_a_request_overrules_name_by_name(http: httpx.Client) -> None:
    asked = {"model": MODEL, "messages": [HELLO]}
    own = {"chat_template_kwargs": {"mood": "sad and far away"}}
    for body, text in ((asked, "gladlowhello"), (asked | own, "sad and far awaylowhello")):
        tokens = http.post("/tokenize", json=body).json()["tokens"]
        told = http.post("/detokenize", json={"model": MODEL, "tokens": tokens}).json()["prompt"]
        assert told == text


@pytest.mark.parametrize(
    ("path", "body", "counts"),
    [
        ("/v1/chat/completions", CHAT, ["prompt_tokens"]),
        ("/v1/messages", CHAT, ["input_tokens", "cache_read_input_tokens"]),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 3}, ["input_tokens"]),
    ],
)
def test_every_kind_of_chat_has_the_defaults(
    path: str, body: dict[str, Any], counts: list[str], http: httpx.Client
) -> None:
    usage = http.post(path, json={"model": MODEL, **body}).json()["usage"]
    assert sum(usage[count] for count in counts) == num_tokens(http, "gladlowhello")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"model": MODEL, "prompt": "hello", "max_tokens": 3}),
    ],
)
def test_every_stream_ends_with_its_usage(
    path: str, body: dict[str, Any], http: httpx.Client
) -> None:
    def events(options: dict[str, Any]) -> list[Any]:
        text = http.post(path, json={**body, "stream": True, **options}).text
        return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]

    last = events({})[-1]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] > 0
    running = events({"stream_options": {"continuous_usage_stats": True}})
    assert all(event["usage"] for event in running)


def test_a_proxy_may_leave_the_path_or_cut_it_off(http: httpx.Client) -> None:
    for path in ("/v1/models", "/llm/v1/models"):
        assert http.get(path).json()["data"][0]["id"] == MODEL
    assert http.get("/llmv1/models").status_code == 404
    assert http.get("/llm").status_code == http.get("/").status_code == 200
    assert http.get("/llm/openapi.json").json()["servers"] == [{"url": "/llm"}]


@pytest.mark.parametrize("path", ["/v1/models", "/llm/v1/models", "/llm/v1/chat/completions"])
def test_a_path_below_another_needs_its_key_too(path: str, http: httpx.Client) -> None:
    answer = httpx.get(f"{http.base_url}{path}")
    assert answer.status_code == 401


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("llm", "root_path must be a path such as /llm, got 'llm'"),
        ("//evil.org", "root_path must be a path"),
        ("/v1", "root_path '/v1' is where this server has its own paths"),
    ],
)
def test_a_path_that_could_not_be_told_apart_is_refused(path: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        settings(root_path=path)


def test_defaults_that_a_template_would_not_see_are_refused(llm: AsyncLLM) -> None:
    given = settings(default_chat_template_kwargs={"messages": []})
    with pytest.raises(ValueError, match="may not set 'messages'"):
        create_app(llm, given)


def test_a_server_listens_at_a_socket_with_a_path(tmp_path: Path) -> None:
    place = tmp_path / "serve.sock"
    given = ("--uds", str(place), "--kv-cache-memory-bytes", "16MiB")
    with ServerProcess(tmp_path / "log", *given) as process:
        transport = httpx.HTTPTransport(uds=str(place))
        process.wait_until_said(f"at unix:{place}")
        assert stat.S_IMODE(place.stat().st_mode) == 0o600
        with httpx.Client(transport=transport, base_url="http://any.name", timeout=60) as client:
            assert client.get("/v1/models").json()["data"][0]["id"] == MODEL
            answer = client.post("/v1/chat/completions", json=CHAT).json()
            assert answer["usage"]["completion_tokens"] > 0
        second = ServerProcess(tmp_path / "log2", *given)
        assert second.wait() == 2
        assert "is in use: a server listens there" in (tmp_path / "log2").read_text()
        process.signal()
        assert process.wait() == 0
    assert not place.exists()


def test_sockets_with_a_path_are_out_of_reach_of_web_pages() -> None:
    assert settings().checks_hosts
    assert not settings(uds=Path("/tmp/a.sock")).checks_hosts
    assert settings(uds=Path("/tmp/a.sock"), allowed_hosts=("b",)).checks_hosts
