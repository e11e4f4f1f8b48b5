"""Commands with --url: what they ask a server, what they show, and what they say when it fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flexinfer.cli.app import app
from flexinfer.cli.endpoint import Endpoint, EndpointError
from helpers.stub_http_server import Reply, events, loopback

MODELS = Reply({"data": [{"id": "served"}]})
CHAT = "/v1/chat/completions"
USAGE = {
    "prompt_tokens": 12,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 5},
}


def invoke(*arguments: str, text: str = "") -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments), input=text)
    return result.exit_code, result.stdout, result.stderr


# chat --url


def chat(
    text: str, *replies: Reply, arguments: tuple[str, ...] = (), exit_code: int = 0
) -> tuple[str, list[Any]]:
    """What was shown, and the bodies of the requests."""
    with loopback({"/v1/models": MODELS, CHAT: replies}) as server:
        code, out, err = invoke("chat", "--url", server.url, *arguments, text=text)
        assert code == exit_code, out + err
        return out, server.bodies(CHAT)


def test_each_turn_sends_all_that_was_said() -> None:
    out, bodies = chat("Hello\nMore\n", events("Hi", "!", usage=USAGE), events("Yes"))
    assert "Hi!" in out
    assert "12 prompt tokens, 5 reused" in out
    assert bodies[0]["model"] == "served"
    assert bodies[1]["messages"] == [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": "More"},
    ]


def test_how_answers_are_drawn_is_left_to_the_server_unless_it_is_said() -> None:
    _, (plain,) = chat("Hello\n", events("Hi"))
    assert plain.keys() == {"model", "messages", "stream", "stream_options", "max_tokens"}
    said = ("--top-k", "5", "--temperature", "1", "--system", "Be kind")
    _, (sampled,) = chat("Hello\n", events("Hi"), arguments=said)
    assert (sampled["top_k"], sampled["temperature"], "top_p" in sampled) == (5, 1.0, False)
    assert sampled["messages"][0] == {"role": "system", "content": "Be kind"}


def test_branches_and_regenerated_answers_have_their_own_past() -> None:
    talk = "Hello\n/fork\nTwo\n/branch 1\nOne\n/regenerate\n"
    _, bodies = chat(talk, *(events(text) for text in ("Hi", "two", "one", "another")))
    said = [[message["content"] for message in body["messages"]] for body in bodies]
    assert said == [
        ["Hello"],
        ["Hello", "Hi", "Two"],
        ["Hello", "Hi", "One"],
        ["Hello", "Hi", "One"],
    ]
    assert "temperature" not in bodies[2]
    assert bodies[3]["temperature"] > 0


def test_a_turn_that_fails_is_no_turn() -> None:
    failures = (
        Reply({"error": {"message": "queue is full"}}, 429),
        Reply(({"error": {"message": "engine broke"}},)),
    )
    talk = "One\nTwo\nThree\n/history\n"
    out, bodies = chat(talk, *failures, events("ok"), exit_code=2)
    assert "answers 429: queue is full" in out
    assert "engine broke" in out
    assert [len(body["messages"]) for body in bodies] == [1, 1, 1]
    assert out.count("user:") == 1


def test_keys_are_sent_and_a_named_model_is_not_looked_up() -> None:
    with loopback({CHAT: events("Hi")}) as server:
        arguments = ("--url", server.url, "--model", "mine", "--api-key", "secret")
        code, _, _ = invoke("chat", *arguments, text="Hello\n")
    ((path, body, headers),) = server.seen
    assert (code, path, body["model"]) == (0, CHAT, "mine")
    assert headers["Authorization"] == "Bearer secret"


def test_a_server_that_shows_no_memory_says_so_and_the_chat_goes_on() -> None:
    with loopback(
        {
            "/v1/models": MODELS,
            "/admin/memory": Reply({"error": {"message": "no key"}}, 401),
            CHAT: events("Hi"),
        }
    ) as server:
        _, out, _ = invoke("chat", "--url", server.url, text="/memory\n/stats\nHello\n")
    assert out.count("no key; pass --admin-api-key") == 2
    assert "Hi" in out


@pytest.mark.parametrize(
    ("command", "source"),
    [
        (("inspect",), ("--admin-api-key", "FLEXINFER_ADMIN_API_KEY")),
        (("chat",), ("--api-key", "FLEXINFER_API_KEY")),
        (("bench", "serve"), ("--api-key", "FLEXINFER_API_KEY")),
        (("bench", "serve", "--model", "m"), ("--api-key", "FLEXINFER_API_KEY")),
    ],
    ids=str,
)
def test_a_key_is_asked_for_in_the_words_of_the_command(
    command: tuple[str, ...], source: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told which header to send."""
    option, variable = source
    for name in ("FLEXINFER_API_KEY", "OPENAI_API_KEY", "FLEXINFER_ADMIN_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    refusal = Reply({"error": {"message": "send the header"}}, 401)
    paths = ("/v1/models", "/v1/completions", "/admin/memory")
    with loopback(dict.fromkeys(paths, refusal)) as server:
        code, _, missing = invoke(*command, "--url", server.url)
        _, _, wrong = invoke(*command, "--url", server.url, option, "x")
    assert code == 2
    assert f"401: it was given no key; pass {option} KEY, or set {variable}" in missing
    assert "header" not in missing
    assert f"send the header; check {option}, and {variable} in the environment" in wrong


# The endpoint.


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_url_may_end_with_v1(suffix: str) -> None:
    with loopback({"/v1/models": MODELS}) as server, Endpoint(server.url + suffix) as endpoint:
        assert endpoint.first_model() == "served"


def test_an_answer_that_is_left_early_is_closed() -> None:
    with loopback({CHAT: events("a", "b")}) as server, Endpoint(server.url) as endpoint:
        stream = endpoint.post_stream(CHAT, {})
        assert "choices" in next(stream)
        stream.close()
        assert list(endpoint.post_stream(CHAT, {}))


@pytest.mark.parametrize(
    "command", [("chat",), ("inspect",), ("top", "--once"), ("bench", "serve")]
)
@pytest.mark.parametrize(
    ("url", "says"),
    [("http://127.0.0.1:9", "is a server running there?"), ("ftp://x", "http://HOST:PORT")],
)
def test_a_server_that_is_not_there_is_one_line(
    command: tuple[str, ...], url: str, says: str
) -> None:
    option = "--base-url" if command[0] == "bench" else "--url"
    code, _, err = invoke(*command, option, url)
    assert code == 2
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("reply", "says"),
    [(Reply("<html>"), "not JSON"), (Reply({"data": []}), "names no model")],
)
def test_answers_of_another_kind_are_refused(reply: Reply, says: str) -> None:
    with (
        loopback({"/v1/models": reply}) as server,
        Endpoint(server.url) as endpoint,
        pytest.raises(EndpointError, match=says),
    ):
        endpoint.first_model()


# bench serve


def completions(*pieces: str) -> Reply:
    chunks: list[Any] = [{"choices": [{"text": piece}]} for piece in pieces]
    usage = {"prompt_tokens": 9, "completion_tokens": len(pieces)}
    return Reply((*chunks, {"choices": [], "usage": usage}))


def bench(*arguments: str, reply: Reply | None = None) -> tuple[int, str, str, list[Any]]:
    path = "/v1/completions"
    with loopback({"/v1/models": MODELS, path: reply or completions("a", "b", "c")}) as server:
        code, out, err = invoke(
            "bench", "serve", "--base-url", server.url, "--disable-tqdm", *arguments
        )
        return code, out, err, server.bodies(path)


def test_the_result_is_json_with_vllms_names() -> None:
    pytest.importorskip("aiohttp")
    arguments = ("--num-prompts", "6", "--max-concurrency", "2", "--json", "--metadata", "a=b")
    limits = ("--goodput", "ttft:60000", "tpot:60000")
    code, out, err, bodies = bench(*arguments, *limits, "--num-warmups", "1")
    assert code == 0, err
    found = json.loads(out)
    assert len(bodies) == 6 + 1 + 1
    assert (found["completed"], found["failed"]) == (6, 0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (54, 18)
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])
    assert found["max_concurrent_requests"] <= 2
    assert (found["model_id"], found["a"], found["max_concurrency"]) == ("served", "b", 2)
    assert {
        f"{kind}_{name}_ms"
        for kind in ("mean", "median", "std", "p99")
        for name in ("ttft", "tpot", "itl", "e2el")
    } <= set(found)


def test_every_request_and_a_picture_can_be_kept(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    pytest.importorskip("matplotlib")
    picture = tmp_path / "load.svg"
    files = ("--save-result", "--save-detailed", "--result-dir", str(tmp_path))
    named = ("--result-filename", "r.json", "--plot", str(picture))
    code, out, err, _ = bench("--num-prompts", "3", *files, *named)
    assert code == 0, err
    assert "Time to first token" in out
    kept = json.loads((tmp_path / "r.json").read_text())
    assert kept["generated_texts"] == ["abc"] * 3
    assert [len(gaps) for gaps in kept["itls"]] == [2, 2, 2]
    assert picture.read_text().startswith("<?xml")


def test_a_trace_gives_the_lengths(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    trace = tmp_path / "trace.csv"
    trace.write_text("num_prefill_tokens,num_decode_tokens\n80,16\n40,8\n")
    dataset = ("--dataset-name", "trace", "--dataset-path", str(trace))
    in_order = ("--max-concurrency", "1")
    code, out, err, bodies = bench(*dataset, "--trace-length-scale", "0.5", "--json", *in_order)
    assert code == 0, err
    assert [len(body["prompt"].split()) for body in bodies[1:]] == [40, 20]
    assert [body["max_tokens"] for body in bodies[1:]] == [8, 4]
    assert json.loads(out)["num_prompts"] == 2


def test_a_server_that_refuses_ends_the_run_before_it_begins() -> None:
    pytest.importorskip("aiohttp")
    refusal = Reply({"error": {"message": "no such model"}}, 404)
    code, _, err, bodies = bench("--model", "x", reply=refusal)
    assert (code, len(bodies)) == (2, 1)
    assert "no such model" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--backend", "tgi"), "--backend is one of"),
        (("--dataset-name", "sharegpt"), "--dataset-name is one of"),
        (("--dataset-name", "trace"), "--dataset-path"),
        (("--goodput", "speed:1"), "--goodput takes"),
        (("--request-rate", "0"), "--request-rate must be positive"),
        (("--metric-percentiles", "101"), "0 to 100"),
        (("--metric-percentiles", "p90"), "--metric-percentiles are numbers"),
        (("--metadata", "x"), "--metadata takes KEY=VALUE"),
        (("--percentile-metrics", "p50"), "--percentile-metrics knows"),
        (("--tokenizer", "/no/such"), "there is no"),
        (("--extra-body", "[1]"), "JSON object"),
        (("--extra-body", "{bad"), "--extra-body is no JSON"),
        (("--header", "x"), "KEY=VALUE"),
        (("ttft:5",), "unexpected arguments"),
        (("--save-detailed",), "--save-result"),
    ],
)
def test_what_can_not_be_measured_is_refused(arguments: tuple[str, ...], says: str) -> None:
    code, _, err, bodies = bench("--num-prompts", "2", *arguments)
    assert code == 2
    assert says in err
    assert bodies == []
