"""Names by which the server may be called: a foreign page must not come by one of its own."""

from __future__ import annotations

import socket
from typing import Any

import httpx
import pytest

from flexinfer.async_llm import AsyncLLM
from flexinfer.server.settings import ServerSettings
from helpers.serving import MODEL, ServerProcess, serving, settings

REBOUND = {"Host": "evil.example:8000"}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("GET", "/v1/models"),
        ("POST", "/tokenize"),
        ("GET", "/metrics"),
        ("GET", "/admin/memory"),
        ("GET", "/"),
        ("OPTIONS", "/v1/completions"),
    ],
)
def test_a_foreign_name_is_refused(method: str, path: str, http: httpx.Client) -> None:
    answer = http.request(method, path, headers=REBOUND)
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "host_not_allowed"
    assert "--allowed-hosts" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:1", "LOCALHOST", "127.0.0.1:80", "127.9.9.9", "[::1]:80"]
)
def test_names_of_this_machine_are_served(host: str, http: httpx.Client) -> None:
    assert http.get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["localhost.evil.example", "x@evil.example", "127.0.0.1.nip.io"])
def test_names_that_look_like_this_machine_are_refused(host: str, http: httpx.Client) -> None:
    assert http.get("/v1/models", headers={"Host": host}).status_code == 403


def test_two_names_at_once_are_nobodys(server: ServerProcess) -> None:
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port or 0), timeout=30) as connection:
        connection.sendall(
            b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"
        )
        assert connection.recv(12) == b"HTTP/1.1 403"


def test_allowed_names_are_served_beside_those_of_this_machine(llm: AsyncLLM) -> None:
    allowed = settings(allowed_hosts=("llm.example", "*.inside.example"))
    with serving(llm, allowed) as url:

        def status(host: str) -> int:
            return httpx.get(f"{url}/v1/models", headers={"Host": host}, timeout=60).status_code

        hosts = ["LLM.example:80", "a.b.inside.example", "localhost", "inside.example", "a.example"]
        assert [status(host) for host in hosts] == [200, 200, 200, 403, 403]


@pytest.mark.parametrize(
    ("given", "checks"),
    [
        ({}, True),
        ({"host": "localhost"}, True),
        ({"host": "::1"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "0.0.0.0", "allowed_hosts": ("a",)}, True),
        ({"api_keys": ("k",)}, False),
        ({"api_keys": ("k",), "allowed_hosts": ("a",)}, True),
    ],
)
def test_hosts_are_checked_where_nothing_else_keeps_pages_out(
    given: dict[str, Any], checks: bool
) -> None:
    assert ServerSettings(served_model_names=(MODEL,), **given).checks_hosts is checks


def test_an_empty_host_is_refused() -> None:
    """A socket takes it for every address of the machine."""
    with pytest.raises(ValueError, match=r"host must be an address .* 0\.0\.0\.0 for all"):
        ServerSettings(served_model_names=(MODEL,), host="")
