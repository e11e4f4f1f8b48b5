"""`flexinfer serve` as a process: where its settings come from, how it starts, how it ends."""

from __future__ import annotations

import gc
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from flexinfer.server.app import create_app
from flexinfer.server.run import ENDING_S, ENGINE_FAILED, bind, listen
from helpers.serving import ServerProcess, make_llm, settings
from helpers.waiting import until

LONG: dict[str, Any] = {"prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "stream": True}


@pytest.fixture
def process(tmp_path: Path) -> Iterator[ServerProcess]:
    arguments = ("--log-format", "json", "--shutdown-timeout", "120")
    with ServerProcess(tmp_path / "log", *arguments) as made:
        yield made.wait_until_ready()


def start_stream(url: str, result: dict[str, Any]) -> threading.Thread:
    """A long request; returns when its first chunk is there."""
    started = threading.Event()

    def read() -> None:
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=120) as answer:
                for line in filter(None, answer.iter_lines()):
                    started.set()
                    result["last_two"] = [*result.get("last_two", []), line][-2:]
        except httpx.HTTPError as error:
            result["error"] = error

    thread = threading.Thread(target=read)
    thread.start()
    assert started.wait(60)
    return thread


def test_sigterm_drains_what_runs(process: ServerProcess) -> None:
    result: dict[str, Any] = {}
    body = b'{"prompt": "Once", "max_tokens": 1}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    url = httpx.URL(process.url)
    address = (url.host, url.port or 0)
    with (
        socket.create_connection(address, 60) as idle,
        socket.create_connection(address, 60) as late,
    ):
        late.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body[:9])
        thread = start_stream(process.url, result)
        process.signal()
        assert idle.recv(1) == b""  # from now on nothing begins
        late.sendall(body[9:])
        answer = b"".join(iter(lambda: late.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 503")
    assert b'"shutting_down"' in answer
    thread.join(120)
    assert result["last_two"][1] == "data: [DONE]"
    assert "error" not in result
    assert process.wait() == 0
    lines = [json.loads(line) for line in process.log.read_text().splitlines()]
    assert any(line["message"].startswith("Serving tiny_chat at http://") for line in lines)
    done = [line for line in lines if line.get("path") == "/v1/completions"]
    assert sorted(line["status"] for line in done) == [200, 503]
    assert all(len(line["request_id"]) == 32 for line in done)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": "Once", "max_tokens": 3, "ignore_eos": True}),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "ignore_eos": True},
        ),
        ("responses", {"input": "Hi", "max_output_tokens": 3}),  # takes no ignore_eos
    ],
)
def test_the_log_has_the_tokens_of_each_request(
    server: ServerProcess, path: str, body: dict[str, Any], stream: bool
) -> None:
    request_id = uuid4().hex
    url = f"{server.url}/v1/{path}"
    body = {**body, "temperature": 0, "stream": stream}
    httpx.post(url, json=body, headers={"X-Request-Id": request_id}, timeout=60)
    (line,) = lines_of(server, request_id)
    assert (line["status"], line["completion_tokens"]) == (200, 3)
    assert line["prompt_tokens"] + 3 == line["total_tokens"]


def test_the_log_has_the_tokens_of_a_stream_that_was_left(server: ServerProcess) -> None:
    request_id = uuid4().hex
    url, headers = f"{server.url}/v1/completions", {"X-Request-Id": request_id}
    with httpx.stream("POST", url, json=LONG, headers=headers, timeout=60) as answer:
        next(answer.iter_lines())
    (line,) = lines_of(server, request_id)
    assert line["disconnected"]
    assert 1 <= line["completion_tokens"] < LONG["max_tokens"]


def lines_of(server: ServerProcess, request_id: str) -> list[dict[str, Any]]:
    """Of a log in JSON, what is said of one request; waits until there is something."""

    def said() -> list[dict[str, Any]]:
        whole = server.log.read_text().rpartition("\n")[0]
        lines = [json.loads(line) for line in whole.splitlines()]
        return [line for line in lines if line.get("request_id") == request_id]

    return until(said, "a line in the log")


def test_a_second_sigterm_stops_at_once(process: ServerProcess) -> None:
    result: dict[str, Any] = {}
    thread = start_stream(process.url, result)
    process.signal()
    until(lambda: "shutting down" in process.log.read_text(), "the first one's effect")
    process.signal(signal.SIGINT)
    process.wait(60)
    thread.join(60)
    assert_was_told(result)
    assert "Traceback" not in process.log.read_text()


def assert_was_told(result: dict[str, Any]) -> None:
    """The stream was cut off by an event in the shape of OpenAI's errors."""
    told, last = result["last_two"]
    error = json.loads(told.removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("service_unavailable_error", "shutting_down")
    assert last == "data: [DONE]"


@pytest.mark.parametrize("changed", [{}, {"use_beam_search": True, "n": 2}])
def test_requests_that_have_no_more_time_are_told(tmp_path: Path, changed: dict[str, Any]) -> None:
    result: dict[str, Any] = {}
    plain = {**LONG, "stream": False, **changed}
    with ServerProcess(tmp_path / "log", "--shutdown-timeout", "0.2") as process:
        url = process.wait_until_ready().url
        thread = start_stream(url, result)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(httpx.post, f"{url}/v1/completions", json=plain, timeout=60)
            until(lambda: num_running(url) > 1, "both to run")
            process.signal()
            start_s = time.monotonic()
            answer = asked.result()
            assert time.monotonic() - start_s < 0.2 + ENDING_S
        thread.join(60)
        assert process.wait() == 0
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    assert_was_told(result)
    assert "Traceback" not in process.log.read_text()


def test_a_body_that_does_not_come_is_not_waited_for(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "log", "--shutdown-timeout", "0") as process:
        url = httpx.URL(process.wait_until_ready().url)
        with socket.create_connection((url.host, url.port or 0), 60) as late:
            late.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
            late.sendall(b"Content-Type: application/json\r\nContent-Length: 9\r\n\r\n{")
            process.signal()
            assert process.wait(30) == 0
    assert "Traceback" not in process.log.read_text()


def num_running(url: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=60).text
    found = re.search(r"(?m)^flexinfer:num_requests_running\{.*\} (.+)$", text)
    assert found is not None
    return float(found[1])


def test_an_engine_that_fails_for_good_ends_the_server_with_its_own_code(tmp_path: Path) -> None:
    """The callers get a typed error; a supervisor sees exit code 1 and one line that says why."""
    code = (
        "import flexinfer.engine.llm_engine as engine, flexinfer.cli as cli\n"
        "def step(self): raise RuntimeError('the device is gone')\n"
        "engine.LLMEngine.step = step\n"
        "cli.main()"
    )
    with ServerProcess(tmp_path / "log", interpreter=("-c", code)) as made:
        made.wait_until_ready()
        answer = httpx.post(f"{made.url}/v1/completions", json={"prompt": "Once"}, timeout=60)
        assert made.wait() == ENGINE_FAILED
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "engine_dead"
    log = made.log.read_text()
    assert "the engine has stopped: the server goes down" in log
    assert "the device is gone" in log


def test_a_port_in_use_is_one_line_and_no_traceback() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "flexinfer.cli", "serve", "--port", port]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in result.stderr
    assert "Traceback" not in result.stderr


def test_two_servers_that_load_do_not_both_have_a_port() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with bind("127.0.0.1", port) as second:  # while the first one loads, too
            listen(first)
            with pytest.raises(OSError, match=f"{port}: Address already in use; name another"):
                listen(second)
        with pytest.raises(OSError, match=f"{port}: Address already in use; name another --port"):
            bind("127.0.0.1", port)


def test_an_address_of_another_machine_is_said_with_what_to_do() -> None:
    with pytest.raises(OSError, match=r"192\.0\.2\.1:0: .*; --host takes an address of this"):
        bind("192.0.2.1", 0)  # for documentation: nobody has it


def test_an_app_that_is_given_up_keeps_no_engine() -> None:
    """FastAPI keeps the functions of endpoints for ever."""
    llm = make_llm()
    state = weakref.ref(create_app(llm, settings()).state.flexinfer)
    llm.shutdown()
    gc.collect()
    assert state() is None
