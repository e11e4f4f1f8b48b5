"""What the suites of vLLM, SGLang and llama.cpp ask of `/v1/messages`, restated."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from helpers.endpoint import Endpoint
from helpers.serving import MODEL

PATH = "/v1/messages"
USER = {"role": "user", "content": "Tell me a story."}
BASE: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 8,
    "temperature": 0,
    "messages": [USER],
}
TOOL = {
    "name": "weather",
    "description": "The weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
ENDPOINT = Endpoint(PATH, BASE)
ask = ENDPOINT.ask


def stream(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    lines = ENDPOINT.lines(http, **fields)
    return [json.loads(line.removeprefix("data: ")) for line in lines if line[:5] == "data:"]


def text_of(answer: dict[str, Any]) -> str:
    return "".join(block["text"] for block in answer["content"])


def test_a_message_has_all_its_parts(http: httpx.Client) -> None:
    answer = ask(http)
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", MODEL)
    assert answer["id"].startswith("msg_")
    assert [block["type"] for block in answer["content"]] == ["text"]
    assert answer["stop_reason"] == "max_tokens"
    assert answer["usage"]["output_tokens"] == 8
    assert isinstance(answer["usage"]["cache_read_input_tokens"], int)
    assert not {"object", "choices", "timings"} & set(answer)


SAID = {"role": "assistant", "content": "Hi there!"}
USED = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "sunny, 25°C"}


@pytest.mark.parametrize(
    "fields",
    [
        {"system": "Speak like a pirate."},
        {"system": [{"type": "text", "text": "Be kind."}, {"type": "text", "text": "Be brief."}]},
        {"messages": [USER, SAID, USER]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Why so blue?"}] * 2}]},
        {
            "messages": [
                USER,
                {"role": "assistant", "content": [USED]},
                {**USER, "content": [RESULT]},
            ]
        },
        {
            "messages": [
                USER,
                {"role": "assistant", "content": [USED]},
                {"role": "user", "content": [{"type": "text", "text": "Here it is:"}, RESULT]},
            ]
        },
        {
            "messages": [
                USER,
                {"role": "assistant", "content": [USED]},
                {"role": "user", "content": [{**RESULT, "is_error": True}]},
            ]
        },
        {"tools": [TOOL]},
    ],
)
def test_all_that_is_said_is_read(fields: dict[str, Any], http: httpx.Client) -> None:
    answer, plain = ask(http, **fields), ask(http)
    assert text_of(answer)
    assert num_input(answer) > num_input(plain)
    deltas = [event["delta"] for event in stream(http, **fields) if "delta" in event]
    assert "".join(delta.get("text", "") for delta in deltas) == text_of(answer)
    counted = {name: value for name, value in (BASE | fields).items() if name in COUNTED}
    count = http.post(f"{PATH}/count_tokens", json=counted).json()
    assert count == {"input_tokens": num_input(answer)}


COUNTED = {"model", "messages", "system", "tools"}


def num_input(answer: dict[str, Any]) -> int:
    usage = answer["usage"]
    return int(usage["input_tokens"] + usage["cache_read_input_tokens"])


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.5},
        {"top_p": 0.9, "top_k": 40},
        {"metadata": {"user_id": "someone"}},
        {"thinking": {"type": "disabled"}},
        {"stop_sequences": ["\n", "END"]},
        {"service_tier": "auto"},
    ],
)
def test_what_they_take_is_taken(fields: dict[str, Any], http: httpx.Client) -> None:
    assert text_of(ask(http, **fields))


def test_a_stop_sequence_is_told(http: httpx.Client) -> None:
    stop = text_of(ask(http))[4:7]
    answer = ask(http, stop_sequences=[stop])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)
    assert stop not in text_of(answer)


FORCED = {"type": "any", "disable_parallel_tool_use": True}


@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL], "tool_choice": FORCED}])
def test_blocks_are_numbered_opened_and_closed(fields: dict[str, Any], http: httpx.Client) -> None:
    events = stream(http, max_tokens=60, **fields)
    assert events[0]["type"] == "message_start"
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["usage"]["input_tokens"] >= 0
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    started = [event["index"] for event in events if event["type"] == "content_block_start"]
    stopped = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert started == stopped == list(range(len(started)))
    kind = "input_json_delta" if fields else "text_delta"
    deltas = [event for event in events if event["type"] == "content_block_delta"]
    assert {event["delta"]["type"] for event in deltas} == {kind}
    assert events[-2]["usage"]["output_tokens"] > 0
    assert events[-2]["delta"]["stop_reason"] == ("tool_use" if fields else "end_turn")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{**USER, "content": [{"type": "image", "source": {}}]}]}, "'image'"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools.0"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "--reasoning-parser"),
        ({"temperature": 2}, "temperature"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    fields: dict[str, Any], says: str, http: httpx.Client
) -> None:
    answer = http.post(PATH, json=BASE | fields)
    assert answer.status_code == 400
    body = answer.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert says in body["error"]["message"]


def test_a_body_that_is_not_sent_as_json_is_refused(http: httpx.Client) -> None:
    answer = http.post(PATH, content=json.dumps(BASE), headers={"Content-Type": "text/plain"})
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"
