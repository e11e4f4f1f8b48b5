"""`flexinfer serve` as a process: where its settings come from, how it starts, how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
import typer

from flexinfer.cli.app import app
from flexinfer.cli.serve_settings import engine_config, server_settings
from flexinfer.server.run import ENGINE_FAILED
from helpers.serving import ServerProcess

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
                for line in answer.iter_lines():
                    started.set()
                    result["last"] = line or result.get("last")
        except httpx.HTTPError as error:
            result["error"] = error

    thread = threading.Thread(target=read)
    thread.start()
    assert started.wait(60)
    return thread


def test_sigterm_drains_what_runs(process: ServerProcess) -> None:
    result: dict[str, Any] = {}
    thread = start_stream(process.url, result)
    process.signal()
    thread.join(120)
    assert result == {"last": "data: [DONE]"}
    assert process.wait() == 0
    lines = [json.loads(line) for line in process.log.read_text().splitlines()]
    assert any(line["message"].startswith("Serving tiny_chat at http://") for line in lines)
    (done,) = [line for line in lines if line.get("path") == "/v1/completions"]
    assert done["status"] == 200
    assert len(done["request_id"]) == 32


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
    deadline = time.monotonic() + 60
    found: list[dict[str, Any]] = []
    while not found and time.monotonic() < deadline:
        time.sleep(0.05)
        whole = server.log.read_text().rpartition("\n")[0]
        lines = [json.loads(line) for line in whole.splitlines()]
        found = [line for line in lines if line.get("request_id") == request_id]
    return found


def test_a_second_sigterm_stops_at_once(process: ServerProcess) -> None:
    result: dict[str, Any] = {}
    thread = start_stream(process.url, result)
    process.signal()
    time.sleep(0.1)
    process.signal(signal.SIGINT)
    process.wait(60)
    thread.join(60)
    assert result["last"] != "data: [DONE]"


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
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert f"can not listen on 127.0.0.1:{port}" in result.stderr
    assert "Traceback" not in result.stderr


def options(*arguments: str) -> dict[str, Any]:
    """What `serve` would be called with."""
    group: Any = typer.main.get_command(app)
    command = group.commands["serve"]
    with command.make_context("serve", list(arguments)) as context:
        return dict(context.params)


def test_a_flag_goes_before_the_environment_before_the_file_before_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("max-num-seqs: 3\nmax_queue_len: 4\nport: 5\napi-key: [a, b]\n")
    given = ("--config", str(file), "--port", "7")
    assert options()["max_num_seqs"] == 64
    assert options(*given)["max_num_seqs"] == 3
    assert options(*given)["api_key"] == ["a", "b"]
    assert options(*given)["port"] == 7
    monkeypatch.setenv("FLEXINFER_MAX_NUM_SEQS", "9")
    monkeypatch.setenv("FLEXINFER_API_KEY", "c d")
    found = options(*given)
    assert (found["max_num_seqs"], found["max_queue_len"], found["port"]) == (9, 4, 7)
    assert found["api_key"] == ["c", "d"]


@pytest.mark.parametrize("text", ["no-such-option: 1", "- a list", "a: [", "config: x.yaml"])
def test_a_bad_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(typer.BadParameter):
        options("--config", str(file))


def test_options_become_settings(tmp_path: Path) -> None:
    given = options(
        "--max-request-bytes", "1MiB", "--no-enable-prefix-caching", "--swap-space", "0"
    )
    assert (given["threads"], given["compile_model"]) == (None, False)
    config = engine_config(given)
    made = server_settings(given, config)
    assert made.model_name == "tiny_chat"
    assert made.max_request_bytes == 1 << 20
    assert not config.enable_prefix_caching
    with pytest.raises(ValueError, match="chat template"):
        server_settings({**given, "chat_template": str(tmp_path / "none.jinja")}, config)
    with pytest.raises(ValueError, match="differ"):
        server_settings({**given, "api_key": ["x"], "admin_api_key": "x"}, config)


def test_threads_and_compile_are_options_of_the_flags_the_environment_and_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine_config(options("--threads", "1", "--compile"))
    assert (config.threads, config.compile) == (1, True)
    file = tmp_path / "serve.yaml"
    file.write_text("threads: 2\ncompile: true\n")
    config = engine_config(options("--config", str(file)))
    assert (config.threads, config.compile) == (2, True)
    monkeypatch.setenv("FLEXINFER_THREADS", "3")
    monkeypatch.setenv("FLEXINFER_COMPILE", "0")
    config = engine_config(options("--config", str(file)))
    assert (config.threads, config.compile) == (3, False)


def test_help_has_groups_and_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom flexinfer.cli import main\nsys.argv = ['flexinfer', 'serve', '--help']\n"
        "try: main()\nexcept SystemExit: pass\n"
        "sys.exit(str({'torch', 'fastapi', 'transformers', 'uvicorn'} & set(sys.modules) or 0))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stderr.strip() == "0"
    for group in ("Model and engine", "KV memory", "Scheduling", "Limits", "--max-num-seqs"):
        assert group in result.stdout


@pytest.mark.parametrize("width", [80, 120])
def test_help_cuts_off_no_name(width: int) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "flexinfer.cli", "serve", "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": str(width)},
    )
    assert "…" not in result.stdout
    for option in typer.main.get_command(app).commands["serve"].params:  # type: ignore[attr-defined]
        assert all(name in result.stdout for name in option.opts if name[:2] == "--")
    assert "--no-enable-prefix-caching turns it off" in " ".join(
        result.stdout.replace("│", " ").split()
    )
    assert "FLEXINFER_MAX_NUM_SEQS" in result.stdout
