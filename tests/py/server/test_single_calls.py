"""Callers that want one call at a time get one, however many a model writes."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from flexinfer.async_llm import AsyncLLM
from helpers.scripted import say
from helpers.serving import MODEL

CALL = '<tool_call>\n{"name": "clock", "arguments": {"zone": "%s"}}\n</tool_call>\n'
WORDS = "Well. " + CALL % "Rome" + CALL % "Paris" + CALL % "Oslo"
CHAT = [{"role": "user", "content": "When?"}]
CLOCK = {"name": "clock", "parameters": {"type": "object"}}


def streamed(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    text = httpx.post(url + path, json={**body, "stream": True}, timeout=60).text
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(one) for one in data if one != "[DONE]"]


@pytest.fixture
def url(scripted: str, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> str:
    say(monkeypatch, llm, WORDS)
    return scripted


@pytest.mark.parametrize(("parallel", "num_calls"), [(False, 1), (True, 3), (None, 3)])
def test_a_chat_has_the_first_call(url: str, parallel: bool | None, num_calls: int) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": CHAT, "parallel_tool_calls": parallel}
    body["tools"] = [{"function": CLOCK}]
    path = "/v1/chat/completions"
    (choice,) = httpx.post(url + path, json=body, timeout=60).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Well. "
    calls = [json.loads(call["function"]["arguments"]) for call in choice["message"]["tool_calls"]]
    assert calls[0] == {"zone": "Rome"}
    assert len(calls) == num_calls
    chunks = [chunk["choices"][0] for chunk in streamed(url, path, body)]
    deltas = [one for chunk in chunks for one in chunk["delta"].get("tool_calls", ())]
    assert {one["index"] for one in deltas} == set(range(num_calls))
    first = "".join(one["function"]["arguments"] for one in deltas if one["index"] == 0)
    assert json.loads(first) == {"zone": "Rome"}
    assert chunks[-1]["finish_reason"] == "tool_calls"


def test_a_response_has_the_first_call(url: str) -> None:
    body: dict[str, Any] = {"model": MODEL, "input": "When?", "parallel_tool_calls": False}
    body["tools"] = [{"type": "function", **CLOCK}]
    whole = httpx.post(f"{url}/v1/responses", json=body, timeout=60).json()
    told = streamed(url, "/v1/responses", body)[-1]["response"]
    for response in (whole, told):
        calls = [item for item in response["output"] if item["type"] == "function_call"]
        assert [json.loads(call["arguments"]) for call in calls] == [{"zone": "Rome"}]


def test_a_message_has_the_first_call(url: str) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": CHAT, "max_tokens": 500}
    body["tools"] = [{"name": "clock", "input_schema": {"type": "object"}}]
    body["tool_choice"] = {"type": "auto", "disable_parallel_tool_use": True}
    whole = httpx.post(f"{url}/v1/messages", json=body, timeout=60).json()
    assert [b["input"] for b in whole["content"] if b["type"] == "tool_use"] == [{"zone": "Rome"}]
    events = streamed(url, "/v1/messages", body)
    begun = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [block["type"] for block in begun] == ["text", "tool_use"]
