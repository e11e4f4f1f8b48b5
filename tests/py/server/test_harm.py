"""What one caller sends must not hold up, crash or crowd out others."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from flexinfer.async_llm import AsyncLLM
from flexinfer.server.http.errors import APIError
from flexinfer.server.http.limits import Limits
from flexinfer.server.parsing.pieces import read_whole
from flexinfer.server.parsing.tool_formats import tool_format
from flexinfer.server.stores.responses import ResponseStore
from flexinfer.server.stores.shares import Share
from helpers.serving import MODEL, ServerProcess, serving, settings
from helpers.waiting import until

HELLO = [{"role": "user", "content": "hello"}]
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
JSON = {"content-type": "application/json"}


def cpu_s(server: ServerProcess) -> float:
    """What the process has computed, whatever else ran on its cores."""
    times = psutil.Process(server.process.pid).cpu_times()
    return float(times.user + times.system)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": [{"role": "x"}] * 15_000}),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}] * 15_000}),
        ("/v1/chat/completions", {"messages": [{"role": "x", "content": 5}] * 15_000}),
        ("/v1/conversations", {"messages": [{"role": "x", "content": 5}] * 15_000}),
        ("/v1/completions", {"prompt": [["x"] * 15_000] * 2}),
        ("/tokenize", {"messages": [{"role": "x", "content": 5}] * 15_000}),
        ("/detokenize", {"tokens": ["x"] * 15_000}),
    ],
)
def test_many_faults_are_refused_at_the_first(
    path: str, body: dict[str, Any], http: httpx.Client, server: ServerProcess
) -> None:
    text = json.dumps(body)
    before_s = cpu_s(server)
    answer = http.post(path, content=text, headers=JSON)
    assert answer.status_code == 400
    assert len(answer.content) < 1000
    assert cpu_s(server) - before_s < 3  # a union without a discriminator takes over 10 s


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/chat/completions", "messages"),
        ("/v1/conversations", "messages"),
        ("/v1/conversations", "items"),
        ("/v1/responses", "input"),
        ("/tokenize", "messages"),
    ],
)
def test_more_messages_than_any_context_holds_are_refused_unread(
    path: str, name: str, http: httpx.Client
) -> None:
    error = http.post(path, json={name: HELLO * 9000}).json()["error"]
    assert error["param"] == name
    assert "at most 8192" in error["message"]


def test_a_fault_is_named_by_its_place(http: httpx.Client) -> None:
    body = {"input": [HELLO[0], {"role": "x", "content": "y"}]}
    assert http.post("/v1/responses", json=body).json()["error"]["param"] == "input.1.message.role"


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "'image_url' are not supported",
        ),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "'input_image' are not supported",
        ),
        (
            "/v1/responses",
            {"input": [{"type": "item_reference", "id": "x"}]},
            "items of type 'item_reference' are not supported",
        ),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 1},
            "'image' are not supported",
        ),
    ],
)
def test_what_is_not_text_is_named_in_one_line(
    path: str, body: dict[str, Any], says: str, http: httpx.Client
) -> None:
    error = http.post(path, json={"model": "tiny_chat", **body}).json()["error"]
    assert says in error["message"]
    assert "\n" not in error["message"]
    assert "string" not in error["message"]
    assert "more)" not in error["message"]  # it is one fault, of whatever a content may be


def test_requests_with_one_id_are_all_served(server: ServerProcess) -> None:
    async def ask(client: httpx.AsyncClient, prompt: Any, request_id: str) -> int:
        body = {"prompt": prompt, "max_tokens": 30, "ignore_eos": True}
        headers = {"X-Request-Id": request_id}
        return (await client.post("/v1/completions", json=body, headers=headers)).status_code

    async def ask_all() -> list[int]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            asked = [("a", "same"), ("b", "same"), (["a", "b"], "x"), ("c", "x-0"), ("d", "x-1")]
            return await asyncio.gather(*[ask(client, *one) for one in asked])

    assert asyncio.run(ask_all()) == [200] * 5


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": ["f"], "arguments": {}}</tool_call>',
        "<tool_call>" + "[" * 1100 + "</tool_call>",
    ],
)
def test_a_call_that_cannot_be_read_is_text(text: str) -> None:
    answer = read_whole(tool_format("hermes").make({"f": {}}), text)
    assert answer.content == text
    assert not answer.calls


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", '{"prompt": "\\ud800"}'),
        ("/v1/conversations", '{"metadata": {"a": "\\ud800"}}'),
        ("/v1/responses", '{"input": "hi", "max_output_tokens": 1, "metadata": {"a": "\\ud800"}}'),
        ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "\\ud800"}]}'),
    ],
)
@pytest.mark.parametrize("kind", ["application/json", "application/x+json"])
def test_half_a_surrogate_pair_is_refused(
    path: str, body: str, kind: str, http: httpx.Client
) -> None:
    answer = http.post(path, content=body, headers={"content-type": kind})
    assert answer.status_code == 400
    assert "not JSON" in answer.json()["error"]["message"]


def test_a_budget_beyond_the_machine_is_refused(admin: httpx.Client) -> None:
    answer = admin.post("/admin/budget", json={"kv_cache_memory": "1000TiB"})
    assert answer.status_code == 400
    assert "this machine has" in answer.json()["error"]["message"]


def test_a_field_may_have_no_name(http: httpx.Client) -> None:
    answer = http.post("/v1/conversations", json={"metadata": {"": 5}})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("metadata")


@pytest.mark.parametrize(
    "metadata", [{"a": "x" * 513}, {"a" * 65: "x"}, {str(i): "x" for i in range(17)}]
)
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/conversations"])
def test_metadata_is_as_small_as_openai_allows(
    path: str, metadata: dict[str, str], http: httpx.Client
) -> None:
    body = {"metadata": metadata}
    answer = http.post(path, json=body | ({"input": "hi"} if path == "/v1/responses" else {}))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("metadata")


# Shares.


def test_a_turn_that_is_refused_leaves_its_conversation_free(http: httpx.Client) -> None:
    kept = http.post("/v1/conversations", json={}).json()["id"]
    turn = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    refused = {**turn, "conversation": {"id": kept, "ttl": 1e9}}
    assert http.post("/v1/chat/completions", json=refused).status_code == 400
    answer = http.post("/v1/chat/completions", json={**turn, "conversation": kept})
    assert answer.status_code == 200, answer.text


def test_who_has_stored_nothing_deletes_nothing() -> None:
    with pytest.raises(APIError, match="there is no response 'resp_0'") as refused:
        ResponseStore(Share(1, 1)).delete("a", "resp_0")
    assert refused.value.status_code == 404


def test_one_key_cannot_take_the_conversations_of_another(llm: AsyncLLM) -> None:
    limits = settings(api_keys=("a", "b"), max_conversations=4, max_stored_bytes=40_000)
    with serving(llm, limits) as url:

        def make(key: str, size: int = 1) -> int:
            message = {"role": "user", "content": "x" * size}
            headers = {"Authorization": f"Bearer {key}"}
            body = {"messages": [message]}
            answer = httpx.post(f"{url}/v1/conversations", json=body, headers=headers, timeout=60)
            return answer.status_code

        assert [make("a"), make("a"), make("a")] == [200, 200, 429]
        assert [make("b", 15_000), make("b", 5_000)] == [429, 200]


def test_stored_responses_are_bounded_by_bytes_per_key(llm: AsyncLLM) -> None:
    with serving(llm, settings(api_keys=("a", "b"), max_stored_bytes=40_000)) as url:

        def ask(key: str, size: int) -> str:
            body = {"input": "x " * size, "max_output_tokens": 1}
            headers = {"Authorization": f"Bearer {key}"}
            answer = httpx.post(f"{url}/v1/responses", json=body, headers=headers, timeout=60)
            return str(answer.json()["id"])

        def is_kept(key: str, response_id: str) -> bool:
            headers = {"Authorization": f"Bearer {key}"}
            kept = httpx.get(f"{url}/v1/responses/{response_id}", headers=headers, timeout=60)
            return kept.is_success

        first, other = ask("a", 1), ask("b", 1)
        last = [ask("a", 900) for _ in range(6)][-1]
        assert not is_kept("a", first)
        assert is_kept("a", last)
        assert is_kept("b", other)


def test_retry_after_is_the_queue_over_its_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    limits = Limits(num_running=2, num_waiting=100, per_key=None)
    held = [limits.hold("", 1) for _ in range(42)]
    for one in held:
        one.__enter__()
    for one in held[:20]:  # four end in a second
        now_s += 0.25
        one.__exit__(None, None, None)
    assert limits.num_active == 22
    assert limits.retry_after_s == 5  # 20 wait


# Slow connections.


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Any:
    log: Path = tmp_path_factory.mktemp("impatient") / "log"
    with ServerProcess(
        log,
        *("--receive-timeout", "1", "--kv-cache-memory-bytes", "32MiB"),
        FLEXINFER_ADMIN_API_KEY="admin",
    ) as made:
        yield made.wait_until_ready()


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", b""),
        (b"\r\n", b""),
        (HEAD, b"HTTP/1.1 408"),
        (HEAD + b"Content-Length: 100\r\n\r\n{", b"HTTP/1.1 408"),
    ],
)
def test_a_request_that_does_not_arrive_is_ended(
    sent: bytes, answer: bytes, impatient: ServerProcess
) -> None:
    url = httpx.URL(impatient.url)
    start_s = time.monotonic()
    with socket.create_connection((url.host, url.port or 0), timeout=25) as connection:
        connection.sendall(sent)
        assert connection.recv(12) == answer  # by default it would take 30 s
        assert time.monotonic() - start_s > 0.5


def test_an_answer_may_take_longer_than_a_request(impatient: ServerProcess) -> None:
    """The engine sleeps meanwhile."""
    body = {"prompt": "a", "max_tokens": 2, "ignore_eos": True}
    headers = {"Authorization": "Bearer admin"}
    with (
        httpx.Client(base_url=impatient.url, timeout=60, headers=headers) as admin,
        ThreadPoolExecutor(1) as threads,
    ):
        admin.post("/admin/sleep").raise_for_status()
        asked = threads.submit(httpx.post, f"{impatient.url}/v1/completions", json=body, timeout=60)
        until(lambda: admin.get("/admin/memory").json()["engine"]["num_waiting"], "the request")
        time.sleep(1.2)
        admin.post("/admin/wake").raise_for_status()
        assert asked.result().json()["usage"]["completion_tokens"] == 2


# Java's HttpClient offers to change to HTTP/2.


@pytest.mark.parametrize("in_one_piece", [True, False])
def test_an_offer_of_http2_is_passed_over(in_one_piece: bool, server: ServerProcess) -> None:
    url = httpx.URL(server.url)
    body = json.dumps({"model": MODEL, "messages": HELLO, "max_tokens": 2}).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\n"
        b"Content-Length: %d\r\nHost: [::1]\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\nUpgrade: h2c\r\n"
        b"Content-Type: application/json\r\n\r\n" % len(body)
    )
    with socket.create_connection((url.host, url.port or 0), timeout=30) as connection:
        connection.sendall(head + body if in_one_piece else head)
        if not in_one_piece:
            time.sleep(0.1)
            connection.sendall(body)
        assert connection.recv(12) == b"HTTP/1.1 200"


@pytest.mark.skipif(shutil.which("java") is None, reason="no java")
def test_javas_client_is_served(server: ServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "Ask.java"
    file.write_text(
        """import java.net.http.*; import java.net.*;
public class Ask { public static void main(String[] a) throws Exception {
  for (HttpClient.Version v : HttpClient.Version.values()) {
    var request = HttpRequest.newBuilder(URI.create(a[0])).header("Content-Type",
        "application/json").POST(HttpRequest.BodyPublishers.ofString(a[1])).build();
    var client = HttpClient.newBuilder().version(v).build();
    System.out.println(client.send(request,
        HttpResponse.BodyHandlers.ofString()).statusCode()); } } }"""
    )
    body = json.dumps({"messages": HELLO, "max_tokens": 2})
    command = ["java", str(file), f"{server.url}/v1/chat/completions", body]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.stdout.split() == ["200", "200"], result.stderr
