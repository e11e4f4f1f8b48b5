"""What strangers send: bytes by hand, as no HTTP library would send them."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlsplit

import httpx
import pytest

from flexinfer.async_llm import AsyncLLM
from helpers.serving import MODEL, ServerProcess, serving, settings

TIMEOUT_S = 60
STREAM = {"model": MODEL, "prompt": "Once", "max_tokens": 5, "temperature": 0.0, "stream": True}


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    assert parts.hostname is not None
    return socket.create_connection((parts.hostname, parts.port), TIMEOUT_S)


def ask(url: str, data: bytes) -> bytes:
    """All that comes until the server closes the connection."""
    with connect(url) as sock:
        sock.sendall(data)
        return b"".join(iter(lambda: sock.recv(65536), b""))


def post(body: bytes, *headers: str, version: str = "1.1") -> bytes:
    lines = [f"POST /v1/completions HTTP/{version}", "Host: localhost", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def test_a_stream_for_http_1_0_is_one_piece_with_its_length(server: ServerProcess) -> None:
    body = json.dumps(STREAM).encode()
    headers = ("Content-Type: application/json", f"Content-Length: {len(body)}")
    head, _, answer = ask(server.url, post(body, *headers, version="1.0")).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert f"content-length: {len(answer)}".encode() in head.lower()
    *events, done, end = answer.decode().split("\n\n")
    texts = [json.loads(one.removeprefix("data: "))["choices"][0]["text"] for one in events]
    whole = httpx.post(f"{server.url}/v1/completions", json={**STREAM, "stream": False}, timeout=60)
    assert "".join(texts) == whole.json()["choices"][0]["text"]
    assert (done, end) == ("data: [DONE]", "")


def test_two_requests_in_one_packet_are_answered_in_their_order(server: ServerProcess) -> None:
    first = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    second = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answer = ask(server.url, first + second)
    assert answer.count(b"HTTP/1.1 200") == 2
    assert answer.index(b'{"status"') < answer.index(b'{"version"')


def test_a_chunked_upload_above_the_limit_is_refused(server: ServerProcess) -> None:
    piece = b"100000\r\n" + b"x" * 0x100000 + b"\r\n"
    data = post(b"", "Content-Type: application/json", "Transfer-Encoding: chunked")
    with connect(server.url) as sock:
        sock.sendall(data + piece * 9)
        answer = b""
        while b"}}" not in answer:
            answer += sock.recv(65536)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"request_too_large" in answer


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = post(b"2\r\n{}\r\n0\r\n", "Transfer-Encoding: chunked")
LINES = b"".join(b"X-%d: %s\r\n" % (i, b"a" * 1000) for i in range(80))
VALUE = b"X: " + b"a" * (64 << 10)


@pytest.mark.parametrize(
    "data",
    [
        HEALTH + LINES,
        HEALTH + VALUE,
        HEALTH + LINES + b"\r\n",
        b"GET /" + b"a" * (64 << 10),
    ],
    ids=["many headers", "one without end", "whole", "long path"],
)
def test_a_head_beyond_the_limit_is_refused_before_its_end(
    data: bytes, server: ServerProcess
) -> None:
    status = b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    assert ask(server.url, data).count(status) == 1
    within = HEALTH + LINES[:60_000].rpartition(b"\r\n")[0]
    answer = ask(server.url, within + b"\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")


def test_a_second_head_beyond_the_limit_is_refused(server: ServerProcess) -> None:
    with connect(server.url) as sock:
        sock.sendall(HEALTH + b"\r\n")
        answer = b""
        while not answer.endswith(b"}"):
            answer += sock.recv(65536)
        sock.sendall(HEALTH + LINES)
        assert sock.recv(65536).startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize("trailers", [LINES, VALUE])
def test_trailers_count_too(trailers: bytes, server: ServerProcess) -> None:
    """They come after the body, when an answer may have been begun. More than one read takes, so
    that the connection may be reset before all is sent."""
    answer = b""
    with connect(server.url) as sock, suppress(ConnectionError):
        sock.sendall(CHUNKED + 8 * trailers)
        answer = sock.recv(65536)
    assert b"HTTP/1.1 200" not in answer


def test_a_caller_that_stops_in_its_request_holds_up_nobody(server: ServerProcess) -> None:
    halves = [
        b"POST /v1/comp",
        post(b'{"prompt": ', "Content-Type: application/json", "Content-Length: 500"),
    ]
    socks = [connect(server.url) for _ in range(8) for _ in halves]
    for sock, half in zip(socks, halves * 8, strict=True):
        sock.sendall(half)
    answer = httpx.post(
        f"{server.url}/v1/completions", json={**STREAM, "stream": False}, timeout=60
    )
    for sock in socks:
        sock.close()
    assert answer.status_code == 200
    assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200


def test_a_form_is_told_to_be_json(server: ServerProcess) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", data={"prompt": "Once"}, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "unsupported_content_type"
    assert "Content-Type: application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/models/", "/v1/models"])
def test_a_slash_at_the_end_of_models_changes_nothing(server: ServerProcess, path: str) -> None:
    answer = httpx.get(server.url + path, headers={"Accept": "text/html"}, timeout=60)
    assert answer.json()["data"][0]["id"] == MODEL


def test_a_slash_at_the_end_of_an_endpoint_leads_to_it(server: ServerProcess) -> None:
    body = {**STREAM, "stream": False}
    url = f"{server.url}/v1/completions/"
    answer = httpx.post(url, json=body, follow_redirects=True, timeout=60)
    assert answer.history[0].status_code == 307
    assert answer.json()["object"] == "text_completion"


@pytest.fixture(scope="module")
def open_url(llm: AsyncLLM) -> Iterator[str]:
    """A server that one origin's pages may call."""
    with serving(llm, settings(allowed_origins=("https://a.example",))) as url:
        yield url


def preflight(url: str, origin: str) -> httpx.Response:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    }
    return httpx.options(f"{url}/v1/chat/completions", headers=headers, timeout=60)


def test_a_page_of_an_allowed_origin_may_send_what_openais_client_sends(open_url: str) -> None:
    answer = preflight(open_url, "https://a.example")
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    assert "x-stainless-os" in answer.headers["access-control-allow-headers"]
    assert preflight(open_url, "https://b.example").status_code == 400


def test_errors_too_can_be_read_by_an_allowed_page(open_url: str) -> None:
    headers = {"Origin": "https://a.example"}
    answer = httpx.post(f"{open_url}/v1/completions", json={}, headers=headers, timeout=60)
    assert answer.status_code == 400
    assert answer.headers["access-control-allow-origin"] == "https://a.example"


def test_without_allowed_origins_no_page_may_call(server: ServerProcess) -> None:
    answer = preflight(server.url, "https://a.example")
    assert answer.status_code == 405
    assert "access-control-allow-origin" not in answer.headers


def test_a_request_that_comes_byte_by_byte_is_answered(server: ServerProcess) -> None:
    body = json.dumps({**STREAM, "stream": False}).encode()
    head = (f"Content-Length: {len(body)}", "Content-Type: application/json", "Connection: close")
    with connect(server.url) as sock:
        for byte in post(body, *head):
            sock.sendall(bytes([byte]))
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"]
