"""Keys, tenants, sizes, queues, slow and vanishing readers, failures: what a server bears."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from flexinfer import LLMEngine
from flexinfer.async_llm import AsyncLLM
from flexinfer.server.http import limits
from helpers.serving import MODEL, make_llm, serving, settings
from helpers.waiting import until

CHAT: Any = [{"role": "user", "content": "Tell me a long story."}]
LONG: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": 1500, "ignore_eos": True}


def keyed(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def tenants(llm: AsyncLLM) -> Iterator[str]:
    """Two keys and an admin key."""
    with serving(llm, settings(api_keys=("k-one", "k-two"), admin_api_key="k-admin")) as url:
        yield url


@pytest.mark.parametrize("headers", [{}, keyed("wrong"), keyed("k-admin"), {"Authorization": "k"}])
def test_without_a_good_key_nothing_is_served(tenants: str, headers: dict[str, str]) -> None:
    answer = httpx.post(
        f"{tenants}/v1/completions", json={"prompt": "a"}, headers=headers, timeout=60
    )
    assert answer.status_code == 401
    assert answer.json()["error"]["type"] == "authentication_error"
    assert httpx.get(f"{tenants}/v1/models", headers=headers, timeout=60).status_code == 401
    for path, body in (("tokenize", {"prompt": "a"}), ("detokenize", {"tokens": [5]})):
        answer = httpx.post(f"{tenants}/{path}", json=body, headers=headers, timeout=60)
        assert answer.status_code == 401


def test_the_openai_client_knows_the_error(tenants: str) -> None:
    client = openai.OpenAI(base_url=f"{tenants}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError) as caught:
        client.chat.completions.create(model=MODEL, messages=CHAT)
    assert caught.value.code == "invalid_api_key"


def test_health_needs_no_key(tenants: str) -> None:
    assert httpx.get(f"{tenants}/health", timeout=60).status_code == 200
    assert httpx.get(f"{tenants}/version", timeout=60).json()["version"]


@pytest.mark.parametrize("path", ["health", "ready", ""])
def test_a_load_balancer_may_ask_with_head(tenants: str, path: str) -> None:
    answer = httpx.head(f"{tenants}/{path}", timeout=60)
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize("key", ["k-one", "none"])
@pytest.mark.parametrize("path", ["memory", "sleep", "reset_prefix_cache"])
def test_an_api_key_is_no_admin_key(tenants: str, key: str, path: str) -> None:
    method = "GET" if path == "memory" else "POST"
    answer = httpx.request(method, f"{tenants}/admin/{path}", headers=keyed(key), timeout=60)
    assert answer.status_code == 401


def test_tenants_never_share_a_prefix(tenants: str) -> None:
    body = {"prompt": "The very same and rather long prompt of two tenants. " * 5, "max_tokens": 1}

    def cached(key: str, **fields: Any) -> int:
        answer = httpx.post(
            f"{tenants}/v1/completions", json={**body, **fields}, headers=keyed(key), timeout=60
        )
        num_cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return num_cached

    assert cached("k-one") == 0
    assert cached("k-one") > 20
    assert cached("k-two") == 0
    assert cached("k-two", cache_salt="x") == 0


def test_a_tenant_sees_no_other_ones_things(tenants: str) -> None:
    one, two = keyed("k-one"), keyed("k-two")
    made = httpx.post(f"{tenants}/v1/conversations", json={}, headers=one, timeout=60).json()
    path = f"{tenants}/v1/conversations/{made['id']}"
    assert httpx.get(path, headers=one, timeout=60).status_code == 200
    assert httpx.get(path, headers=two, timeout=60).status_code == 404
    response = httpx.post(
        f"{tenants}/v1/responses",
        json={"input": "Hi", "max_output_tokens": 2},
        headers=one,
        timeout=60,
    ).json()
    assert (
        httpx.get(f"{tenants}/v1/responses/{response['id']}", headers=two, timeout=60).status_code
        == 404
    )


def test_without_an_admin_key_only_the_map_is_open_to_this_machine(llm: AsyncLLM) -> None:
    with serving(llm, settings()) as url:
        assert httpx.get(f"{url}/admin/memory", timeout=60).status_code == 200
        assert (
            httpx.get(
                f"{url}/admin/memory", headers={"Host": "evil.example"}, timeout=60
            ).status_code
            == 403
        )
        for path in ("/admin/sleep", "/sleep", "/wake_up"):
            assert httpx.post(f"{url}{path}", timeout=60).status_code == 403
        assert httpx.get(f"{url}/is_sleeping", timeout=60).status_code == 403


def test_the_map_is_not_open_under_a_name_that_others_may_use(llm: AsyncLLM) -> None:
    """Such as that of a proxy on this machine: whoever comes through it is not this machine."""
    with serving(llm, settings(allowed_hosts=("proxy.example",))) as url:
        for path, status in (("/v1/models", 200), ("/admin/memory", 403)):
            answer = httpx.get(f"{url}{path}", headers={"Host": "proxy.example"}, timeout=60)
            assert answer.status_code == status


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_is_refused(llm: AsyncLLM, chunked: bool) -> None:
    content = json.dumps({"prompt": "a" * 5000}).encode()

    def pieces() -> Iterator[bytes]:
        yield from (content[i : i + 500] for i in range(0, len(content), 500))

    with serving(llm, settings(max_request_bytes=2000)) as url:
        answer = httpx.post(
            f"{url}/v1/completions",
            content=pieces() if chunked else content,
            headers={"Content-Type": "application/json"},
            timeout=60,
        )
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"


def test_prompts_n_and_logprobs_are_bounded(llm: AsyncLLM) -> None:
    with serving(llm, settings(max_prompt_tokens=10, max_n=2, max_logprobs=3)) as url:
        for body, param in (
            ({"prompt": [5] * 11}, "prompt"),
            ({"prompt": "a", "n": 3}, "n"),
            ({"prompt": "a", "logprobs": 4}, "logprobs"),
        ):
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == param


def num_unfinished(url: str) -> int:
    engine = httpx.get(f"{url}/admin/memory", timeout=60).json()["engine"]
    return int(engine["num_running"] + engine["num_waiting"])


@contextlib.contextmanager
def slow(llm: AsyncLLM) -> Iterator[Callable[[], None]]:
    """200 ms per step: nothing ends by itself while it is looked at. Gives what ends that."""
    is_over = threading.Event()

    def slow_down(engine: LLMEngine) -> Callable[[], None]:
        runner, compute = engine.runner, engine.runner.compute

        def compute_slowly(*args: Any) -> Any:
            is_over.wait(0.2)
            return compute(*args)

        runner.compute = compute_slowly  # type: ignore[method-assign]
        return lambda: setattr(runner, "compute", compute)

    repair = call(llm, slow_down)
    try:
        yield is_over.set
    finally:
        is_over.set()
        call(llm, lambda _: repair())


def test_a_full_queue_is_429_with_retry_after() -> None:
    long = {**LONG, "max_tokens": 400}
    llm = make_llm(max_num_seqs=2)
    try:
        with serving(llm, settings(max_queue_len=1)) as url, slow(llm) as hurry:
            with concurrent.futures.ThreadPoolExecutor(3) as pool:
                post = [
                    pool.submit(httpx.post, f"{url}/v1/completions", json=long, timeout=120)
                    for _ in range(3)
                ]
                until(lambda: num_unfinished(url) == 3, "three requests")
                refused = httpx.post(
                    f"{url}/v1/completions", json={**LONG, "max_tokens": 1}, timeout=60
                )
                assert refused.status_code == 429
                assert refused.json()["error"]["code"] == "queue_full"
                assert 1 <= int(refused.headers["Retry-After"]) <= 60
                hurry()
                assert [one.result().status_code for one in post] == [200] * 3
            served = httpx.post(f"{url}/v1/completions", json={**LONG, "max_tokens": 1}, timeout=60)
            assert served.status_code == 200
            too_many = httpx.post(f"{url}/v1/completions", json={"prompt": ["a"] * 4}, timeout=60)
            assert too_many.status_code == 400
    finally:
        llm.shutdown()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_request(llm: AsyncLLM, stream: bool) -> None:
    with serving(llm, settings()) as url, slow(llm):
        host, port = url.removeprefix("http://").split(":")
        body = json.dumps({**LONG, "stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Length: {len(body)}\r\n"
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            until(lambda: num_unfinished(url) == 1, "the request")
        until(lambda: num_unfinished(url) == 0, "its end")


def test_a_reader_that_reads_nothing_is_cut_off(llm: AsyncLLM) -> None:
    """Its chunks are large, so that the socket's buffers fill before the stream ends."""
    body = {**LONG, "stream": True, "logprobs": 20, "n": 8, "max_tokens": 1000}
    content = json.dumps(body).encode()
    with serving(llm, settings(send_timeout_s=0.3)) as url:
        host, port = url.removeprefix("http://").split(":")
        head = f"POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Length: {len(content)}\r\n"
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with sock:
            sock.connect((host, int(port)))
            sock.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
            sock.settimeout(60)
            received = sock.recv(1)
            until(lambda: num_unfinished(url) == 0, "its end")
            while piece := sock.recv(1 << 16):
                received += piece
        assert b"[DONE]" not in received


def break_model(engine: LLMEngine) -> Callable[[], None]:
    """Make the next steps fail; returns what repairs it."""
    runner, compute = engine.runner, engine.runner.compute

    def broken(*_: Any) -> Any:
        raise RuntimeError("the device is gone")

    runner.compute = broken  # type: ignore[method-assign]
    return lambda: setattr(runner, "compute", compute)


def call(llm: AsyncLLM, function: Callable[[LLMEngine], Any]) -> Any:
    """From a thread without an event loop."""
    return llm._thread.call(function).result(60)


@pytest.mark.parametrize("stream", [False, True])
def test_a_failing_step_is_500_and_the_next_request_is_served(llm: AsyncLLM, stream: bool) -> None:
    with serving(llm, settings()) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        repair = call(llm, break_model)
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(model=MODEL, messages=CHAT, stream=stream)
        assert caught.value.code == "engine_error"
        call(llm, lambda _: repair())
        answer = client.chat.completions.create(
            model=MODEL, messages=CHAT, temperature=0, max_completion_tokens=2
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 2


def test_a_step_that_fails_in_a_stream_ends_it_with_an_error(llm: AsyncLLM) -> None:
    with serving(llm, settings()) as url, slow(llm):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        stream = client.completions.create(**LONG_STREAM)
        next(iter(stream))
        repair = call(llm, break_model)
        with pytest.raises(openai.APIError, match="the device is gone"):
            list(stream)
        call(llm, lambda _: repair())


LONG_STREAM: Any = {
    "model": MODEL,
    "prompt": "Once",
    "max_tokens": 1500,
    "stream": True,
    "extra_body": {"ignore_eos": True},
}


def test_a_dead_engine_is_told_to_everybody() -> None:
    llm = make_llm()
    with serving(llm, settings()) as url:
        llm.shutdown()
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=60)
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "engine_dead"
        assert httpx.get(f"{url}/health", timeout=60).status_code == 503
        assert httpx.get(f"{url}/ready", timeout=60).status_code == 503


def test_a_tenant_has_others_while_they_were_served_of_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(limits.time, "monotonic", lambda: now_s)
    made = limits.Limits(num_running=4, num_waiting=0, per_key=None)

    def serve(tenant: str) -> None:
        with made.hold(tenant, 1):
            pass

    serve("a")
    assert not made.has_others("a")
    assert made.has_others("b")
    serve("b")
    assert made.has_others("a")
    now_s += limits.RECENT_S
    serve("a")
    assert not made.has_others("a")
    serve("b")
    serve("a")
    assert made.has_others("a")
