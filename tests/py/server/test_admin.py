"""Administration: the memory map, the budget, sleep, traces; conversations, which pin memory."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from flexinfer.server.protocol.chat import ChatCompletion
from helpers.serving import MODEL

CHAT: Any = [{"role": "user", "content": "Please remember this rather long sentence. " * 6}]


def ask(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"messages": CHAT, "temperature": 0, "max_completion_tokens": 8, **fields}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_the_map_is_whole(admin: httpx.Client) -> None:
    ask(admin)
    found = admin.get("/admin/memory").json()
    assert found["object"] == "memory_map"
    assert found["stats"]["resident_bytes"] >= found["stats"]["recorded_bytes"] > 0
    chunks = {chunk["id"]: chunk for chunk in found["chunks"]}
    named = [c for p in found["prefixes"] for c in p["chunks"]]
    assert named
    assert all(chunks[chunk]["recorded"] for chunk in named)
    for vtensor in found["vtensors"]:
        assert set(vtensor["chunks"]) <= set(chunks)
        assert vtensor["state"] in ("live", "parked", "held", "retiring", "broken")


def test_the_map_shows_who_shares_a_chunk(admin: httpx.Client) -> None:
    """Four samples of one prompt, while they run."""
    body = {"prompt": "Once upon a time " * 20, "n": 4, "max_tokens": 1500, "ignore_eos": True}
    most, deadline = 0, time.monotonic() + 60
    with admin.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        while most < 4 and time.monotonic() < deadline:
            found = admin.get("/admin/memory").json()
            live = {v["id"]: v for v in found["vtensors"] if v["state"] == "live"}
            shared = [chunk for chunk in found["chunks"] if len(chunk["sharers"]) > 1]
            for chunk in shared:
                holders = {key for key, v in live.items() if chunk["id"] in v["chunks"]}
                assert holders == set(chunk["sharers"])
            most = max(most, *(len(chunk["sharers"]) for chunk in shared), 0)
            assert all("cmpl-" in v["request_id"] for v in live.values())
            time.sleep(0.02)
    assert most == 4


def test_an_unchanged_map_is_304(admin: httpx.Client) -> None:
    """Once the background worker has cleaned up after the tests before."""
    etag = ""
    for _ in range(100):
        answer = admin.get("/admin/memory", headers={"If-None-Match": etag})
        if answer.status_code == 304:
            break
        etag = answer.headers["ETag"]
        time.sleep(0.15)
    assert answer.status_code == 304
    assert not answer.content


def test_a_large_map_is_cut(admin: httpx.Client) -> None:
    ask(admin)
    found = admin.get("/admin/memory", params={"max_rows": 1}).json()
    assert found["truncated"]
    assert sum(len(vtensor["chunks"]) for vtensor in found["vtensors"]) <= 1


@pytest.mark.parametrize("name", ["foo", ""])
def test_a_server_alone_has_no_replicas(admin: httpx.Client, name: str) -> None:
    """It answered as if it were the one that was named, and would have slept in its place."""
    for method, path in (("GET", "/admin/memory"), ("POST", "/admin/sleep"), ("POST", "/sleep")):
        answer = admin.request(method, path, params={"replica": name})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (404, "no_such_replica")
        assert f"no replica {name!r}: this server is alone" in error["message"]
    assert admin.get("/is_sleeping").json() == {"is_sleeping": False}


def test_the_budget_changes_while_serving(admin: httpx.Client) -> None:
    change = admin.post("/admin/budget", json={"kv_cache_memory": "16MiB"}).json()
    assert change["new_bytes"] == 16 << 20
    assert admin.get("/admin/memory").json()["stats"]["budget_bytes"] == 16 << 20
    ask(admin)
    assert admin.post("/admin/budget", json={"kv_cache_memory": 64 << 20}).status_code == 200
    wrong = admin.post("/admin/budget", json={"kv_cache_memory": "much"})
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "kv_cache_memory"


def test_vllms_routes_put_it_to_sleep_and_wake_it(admin: httpx.Client) -> None:
    """As trainers call them: levels and tags in the query, without a body."""
    before = ask(admin)
    assert admin.get("/is_sleeping").json() == {"is_sleeping": False}
    assert admin.post("/sleep", params={"level": 1}).json()["returned_bytes"] > 0
    assert admin.get("/is_sleeping").json() == {"is_sleeping": True}
    assert admin.get("/admin/memory").json()["engine"]["is_sleeping"]
    assert admin.post("/wake_up", params={"tags": "weights"}).json() == {"is_sleeping": True}
    told = admin.post("/wake_up", params={"tags": ["weights", "kv_cache"]})
    assert told.json() == {"is_sleeping": False}
    assert ask(admin)["choices"] == before["choices"]
    assert admin.post("/sleep", params={"level": 2}).status_code == 200
    assert admin.post("/wake_up").json() == {"is_sleeping": False}
    assert ask(admin)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("query", [{}, {"mode": "abort"}, {"mode": "keep"}], ids=str)
def test_requests_under_way_end_where_vllms_route_says_nothing_else(
    admin: httpx.Client, query: dict[str, Any]
) -> None:
    body = {"prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    with admin.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        admin.post("/sleep", params=query).raise_for_status()
        try:
            told = "" if "keep" in query.values() else "".join(lines)
        finally:
            admin.post("/wake_up").raise_for_status()
        if told:
            assert '"code":"aborted"' in told
        else:
            assert '"finish_reason":"length"' in "".join(lines)


@pytest.mark.parametrize(
    ("path", "query", "param"),
    [
        ("/sleep", {"level": 0}, "level"),
        ("/sleep", {"mode": "wait"}, "mode"),
        ("/wake_up", {"tags": "kv"}, "tags"),
    ],
)
def test_what_vllms_routes_do_not_know_is_refused_by_name(
    admin: httpx.Client, path: str, query: dict[str, Any], param: str
) -> None:
    refused = admin.post(path, params=query)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert admin.get("/is_sleeping").json() == {"is_sleeping": False}


def test_a_sleeping_server_answers_after_waking(admin: httpx.Client) -> None:
    before = ask(admin)
    assert admin.post("/admin/sleep", json={"level": 1}).json()["returned_bytes"] > 0
    try:
        assert admin.get("/ready").status_code == 503
        assert admin.get("/health").status_code == 200
        assert admin.get("/admin/memory").json()["engine"]["is_sleeping"]
        for path, body in (("budget", {"kv_cache_memory": "32MiB"}), ("reset_prefix_cache", None)):
            refused = admin.post(f"/admin/{path}", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "asleep")
        answers: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda: answers.append(ask(admin)))
        thread.start()
        time.sleep(0.2)
        assert thread.is_alive()
    finally:
        assert not admin.post("/admin/wake").json()["is_sleeping"]
    thread.join(60)
    assert answers[0]["choices"] == before["choices"]
    assert answers[0]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_the_prefix_cache_can_be_emptied(admin: httpx.Client) -> None:
    ask(admin)
    assert admin.post("/admin/reset_prefix_cache").json()["forgotten_tokens"] > 0
    assert ask(admin)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_trace_is_written(admin: httpx.Client) -> None:
    started = admin.post("/admin/trace", json={"action": "start", "name": "run.jsonl"})
    assert started.json()["tracing"]
    assert admin.post("/admin/trace", json={"action": "start"}).status_code == 409
    ask(admin)
    stopped = admin.post("/admin/trace", json={"action": "stop"}).json()
    assert Path(stopped["path"]).read_text().count("\n") > 5
    escape = admin.post("/admin/trace", json={"action": "start", "name": "../x"})
    assert escape.status_code == 400


def converse(client: httpx.Client, conversation: str, text: str, **fields: Any) -> ChatCompletion:
    message = [{"role": "user", "content": text}]
    return ChatCompletion(**ask(client, messages=message, conversation=conversation, **fields))


def test_a_conversation_remembers_and_stays_in_memory(admin: httpx.Client) -> None:
    system = {"role": "system", "content": "You are kind. " * 8}
    made = admin.post("/v1/conversations", json={"ttl": 60, "messages": [system]}).json()
    first = converse(admin, made["id"], "My name is Ada.")
    admin.post("/admin/reset_prefix_cache")  # what is pinned stays
    second = converse(admin, made["id"], "What is my name?")
    found = admin.get(f"/v1/conversations/{made['id']}").json()
    assert [m["role"] for m in found["messages"]] == ["system", *["user", "assistant"] * 2]
    assert found["pinned_tokens"] > 0
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens
    assert admin.delete(f"/v1/conversations/{made['id']}").json()["deleted"]
    assert admin.get(f"/v1/conversations/{made['id']}").status_code == 404


def num_pinned_tokens(client: httpx.Client) -> int:
    """What is left of the prefix cache after it was emptied."""
    client.post("/admin/reset_prefix_cache")
    return sum(prefix["num_tokens"] for prefix in client.get("/admin/memory").json()["prefixes"])


def test_a_conversation_can_be_deleted_asleep(admin: httpx.Client) -> None:
    of_others = num_pinned_tokens(admin)
    made = admin.post("/v1/conversations", json={}).json()
    converse(admin, made["id"], "My name is Ada. " * 8)
    assert num_pinned_tokens(admin) > of_others
    admin.post("/admin/sleep", json={"level": 1})
    try:
        deleted = admin.delete(f"/v1/conversations/{made['id']}")
    finally:
        admin.post("/admin/wake")
    assert deleted.status_code == 200
    assert num_pinned_tokens(admin) <= of_others


def test_a_fork_goes_its_own_way(admin: httpx.Client) -> None:
    made = admin.post("/v1/conversations", json={}).json()
    converse(admin, made["id"], "My name is Ada. " * 8)
    fork = admin.post(f"/v1/conversations/{made['id']}/fork").json()
    assert fork["id"] != made["id"]
    left = converse(admin, made["id"], "What is my name?")
    right = converse(admin, fork["id"], "What is my name?")
    assert left.choices[0].message.content == right.choices[0].message.content
    for one in (made, fork):
        assert len(admin.get(f"/v1/conversations/{one['id']}").json()["messages"]) == 4
        admin.delete(f"/v1/conversations/{one['id']}")


def test_a_streamed_turn_is_remembered(admin: httpx.Client, client: openai.OpenAI) -> None:
    made = admin.post("/v1/conversations", json={}).json()
    text = "".join(
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hello"}],
            temperature=0,
            stream=True,
            extra_body={"conversation": {"id": made["id"], "ttl": 30}},
        )
    )
    found = admin.get(f"/v1/conversations/{made['id']}").json()
    assert found["messages"][-1]["content"] == text
    assert found["ttl"] == 30
    admin.delete(f"/v1/conversations/{made['id']}")


def test_a_conversation_ends_with_its_time_to_live(admin: httpx.Client) -> None:
    made = admin.post("/v1/conversations", json={"ttl": 0.2}).json()
    time.sleep(0.3)
    answer = admin.get(f"/v1/conversations/{made['id']}")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "conversation_not_found"


def test_a_conversation_has_one_turn_at_a_time(admin: httpx.Client) -> None:
    """The first turn lasts: the engine is asleep."""
    made = admin.post("/v1/conversations", json={}).json()
    turn = {"messages": CHAT, "conversation": made["id"], "max_completion_tokens": 2}
    admin.post("/admin/sleep")
    with ThreadPoolExecutor() as pool:
        try:
            first = pool.submit(admin.post, "/v1/chat/completions", json=turn)
            while admin.get("/admin/memory").json()["engine"]["num_waiting"] == 0:
                assert not first.done()
                time.sleep(0.02)
            second = admin.post("/v1/chat/completions", json=turn)
        finally:
            admin.post("/admin/wake")
        assert second.status_code == 409
        assert first.result().status_code == 200
    admin.delete(f"/v1/conversations/{made['id']}")


def test_tokenize_and_back(http: httpx.Client) -> None:
    made = http.post("/tokenize", json={"prompt": "Hello, world", "return_token_strs": True}).json()
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
    assert made["max_model_len"] == 2048
    back = http.post("/detokenize", json={"tokens": made["tokens"]}).json()
    assert "Hello, world" in back["prompt"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": CHAT}),
        ("/detokenize", {"tokens": [99999]}),
        ("/detokenize", {"tokens": [-1]}),
    ],
)
def test_bad_token_requests_are_400(http: httpx.Client, path: str, body: Any) -> None:
    assert http.post(path, json=body).status_code == 400


def test_a_chat_is_tokenized_as_it_is_prompted(http: httpx.Client) -> None:
    counted = http.post("/tokenize", json={"messages": CHAT}).json()["count"]
    assert counted == ask(http)["usage"]["prompt_tokens"]


def test_the_caller_s_request_id_comes_back(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"prompt": "a"}, headers={"X-Request-Id": "mine-1"})
    assert answer.headers["X-Request-Id"] == "mine-1"
    forged = http.get("/health", headers={"X-Request-Id": "two words"})
    assert forged.headers["X-Request-Id"] != "two words"
