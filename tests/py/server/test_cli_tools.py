"""chat --url, top, inspect and bench serve against a real `flexinfer serve`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from flexinfer.cli.app import app
from flexinfer.cli.settings import SHIPPED_MODEL
from flexinfer.cli.top.sample import Sample
from helpers.serving import MODEL, ServerProcess

pytest.importorskip("aiohttp")


def invoke(*arguments: str, text: str = "") -> str:
    result = CliRunner().invoke(app, list(arguments), input=text, env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    return result.stdout


def scrape(http: httpx.Client) -> Sample:
    return Sample.parse(http.get("/metrics").text, 0.0)


def key(admin: httpx.Client) -> str:
    return admin.headers["Authorization"].removeprefix("Bearer ")


def bench(server: ServerProcess, *arguments: str) -> dict[str, Any]:
    options = ("--base-url", server.url, "--ignore-eos", "--disable-tqdm", "--json")
    found: dict[str, Any] = json.loads(invoke("bench", "serve", *options, *arguments))
    return found


def test_a_chat_reuses_what_the_server_recorded(server: ServerProcess, admin: httpx.Client) -> None:
    said = "Hello\nWhat is your name?\n/fork\nTell me more.\n/memory\n/stats\n"
    out = invoke("chat", "--url", server.url, "--admin-api-key", key(admin), text=said)
    reused = [line for line in out.splitlines() if "reused" in line]
    assert len(reused) == 3
    assert all(", 0 reused" not in line for line in reused[1:])
    assert "each letter is a chunk" in out
    assert "chunks_aliased" in out


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_load_has_the_lengths_that_were_asked_for(server: ServerProcess, backend: str) -> None:
    sizes = ("--random-input-len", "40", "--random-output-len", "6", "--num-prompts", "8")
    tokenizer = ("--tokenizer", str(SHIPPED_MODEL))
    found = bench(server, "--backend", backend, *sizes, *tokenizer, "--max-concurrency", "4")
    assert (found["completed"], found["failed"], found["model_id"]) == (8, 0, MODEL)
    assert found["total_output_tokens"] == 8 * 6
    if backend == "openai":
        assert found["total_input_tokens"] == 8 * 40
    assert 0 < found["median_ttft_ms"] <= found["median_e2el_ms"]


def test_a_trace_shares_prefixes_as_it_did(
    server: ServerProcess, http: httpx.Client, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 100 * i, "input_length": 1536, "output_length": 64, "hash_ids": [0, 1, 2 + i]}
        for i in range(4)
    ]
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    before = scrape(http)
    dataset = ("--dataset-name", "trace", "--dataset-path", str(trace), "--num-prompts", "4")
    scales = ("--trace-length-scale", "0.0625", "--seed", "7")
    found = bench(server, *dataset, *scales, "--tokenizer", str(SHIPPED_MODEL))
    now = scrape(http)
    hits = now.values["prefix_cache_hits_total"] - before.values["prefix_cache_hits_total"]
    assert found["total_input_tokens"] == 4 * 96
    # The trial before the run is the first request; all four find it, or each other, recorded.
    assert hits >= 4 * 64


def test_top_counts_what_was_served(server: ServerProcess, http: httpx.Client) -> None:
    before = scrape(http)
    bench(server, "--num-prompts", "3", "--random-input-len", "20", "--random-output-len", "5")
    numbers = scrape(http).numbers(before)
    assert numbers["requests_ended"] == 3 + 1
    shown = json.loads(invoke("top", "--url", server.url, "--once", "--json"))
    assert shown["up"]
    assert shown["model"] == MODEL
    assert shown["latency_s"]["time_to_first_token"]["p50"] > 0
    assert shown["exposed_us_per_step"] > 0
    assert "since the start" in invoke("top", "--url", server.url, "--once")


def test_refused_requests_are_counted_too(server: ServerProcess, http: httpx.Client) -> None:
    before = scrape(http)
    assert http.post("/admin/sleep").status_code == 401
    http.get("/v1/models")
    text = http.get("/metrics").text
    now = Sample.parse(text, 0.0)
    answers = [sample.values.get("http_requests_total", 0.0) for sample in (before, now)]
    assert answers[1] - answers[0] == 3  # and the scrape before
    assert 'method="POST",path="none",status="401"' in text
    assert 'method="GET",path="/v1/models",status="200"' in text


def test_inspect_says_why_a_conversation_stays(
    server: ServerProcess, http: httpx.Client, admin: httpx.Client, tmp_path: Path
) -> None:
    made = http.post("/v1/conversations", json={}).json()
    http.post(
        "/v1/chat/completions",
        json={
            "model": MODEL,
            "messages": [{"role": "user", "content": "Please remember this conversation."}],
            "conversation": made["id"],
            "max_tokens": 8,
        },
    ).raise_for_status()
    picture = tmp_path / "map.svg"
    options = ("--url", server.url, "--admin-api-key", key(admin))
    report = json.loads(invoke("inspect", *options, "--json", "--picture", str(picture)))
    reasons = [reason for prefix in report["prefixes"] for reason in prefix["kept_because"]]
    assert any(reason.startswith("pinned by") for reason in reasons)
    assert picture.stat().st_size > 0
    assert "Please remember" in invoke("inspect", *options, "--tables")
    assert "More: --map" in invoke("inspect", *options)
    http.delete(f"/v1/conversations/{made['id']}").raise_for_status()
