"""What SGLang's suite asks of completions in all combinations, Open Responses of every event, and
what is asked of endpoints that are not here."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import httpx
import pytest

from helpers.endpoint import Endpoint

COMPLETIONS = Endpoint("/v1/completions", {"max_tokens": 2, "temperature": 0})
RESPONSES = Endpoint("/v1/responses", {"input": "Hello", "max_output_tokens": 60})
TEXT = "The capital of France is"
TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def ids(http: httpx.Client) -> list[int]:
    found: list[int] = http.post("/tokenize", json={"prompt": TEXT}).json()["tokens"]
    return found


@pytest.mark.parametrize(
    ("echo", "logprobs", "is_list", "n", "is_ids"),
    list(product([False, True], [None, 5], [False, True], [1, 2], [False, True])),
)
def test_all_ways_to_ask_for_completions_agree(
    http: httpx.Client,
    ids: list[int],
    echo: bool,
    logprobs: int | None,
    is_list: bool,
    n: int,
    is_ids: bool,
) -> None:
    prompt: Any = ids if is_ids else TEXT
    num_prompts = 2 if is_list else 1
    fields = {"prompt": [prompt] * 2 if is_list else prompt, "echo": echo, "logprobs": logprobs}
    fields |= {"n": n, "stream_options": {"include_usage": True}}
    *events, last = COMPLETIONS.stream(http, **fields)
    del fields["stream_options"]
    whole = COMPLETIONS.ask(http, **fields)
    choices = whole["choices"]
    assert [choice["index"] for choice in choices] == list(range(n * num_prompts))
    assert whole["usage"]["prompt_tokens"] == num_prompts * len(ids)
    assert last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    streamed: list[list[dict[str, Any]]] = [[] for _ in choices]
    for event in events:
        (part,) = event["choices"]
        streamed[part["index"]].append(part)
    for choice, parts in zip(choices, streamed, strict=True):
        assert choice["text"].startswith(TEXT) == echo
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert sum(part["finish_reason"] is not None for part in parts) == 1
        assert (choice["logprobs"] is None) == (logprobs is None)
        if logprobs is not None:
            names = [
                name for part in parts if part["logprobs"] for name in part["logprobs"]["tokens"]
            ]
            assert names == choice["logprobs"]["tokens"]
            assert len(names) == 2 + echo * len(ids)


# Open Responses.

ITEM = {"item_id": str, "output_index": int}
PART = {**ITEM, "content_index": int}
EVENTS: dict[str, dict[str, type]] = {
    "response.created": {"response": dict},
    "response.in_progress": {"response": dict},
    "response.completed": {"response": dict},
    "response.incomplete": {"response": dict},
    "response.output_item.added": {"output_index": int, "item": dict},
    "response.output_item.done": {"output_index": int, "item": dict},
    "response.content_part.added": {**PART, "part": dict},
    "response.content_part.done": {**PART, "part": dict},
    "response.output_text.delta": {**PART, "delta": str, "logprobs": list},
    "response.output_text.done": {**PART, "text": str, "logprobs": list},
    "response.function_call_arguments.delta": {**ITEM, "delta": str},
    "response.function_call_arguments.done": {**ITEM, "arguments": str},
}


@pytest.mark.parametrize(
    ("fields", "kind"),
    [({}, "message"), ({"tools": [TOOL], "tool_choice": "required"}, "function_call")],
)
def test_every_event_has_what_its_type_must_have(
    http: httpx.Client, fields: dict[str, Any], kind: str
) -> None:
    lines = RESPONSES.lines(http, **fields)
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line[:5] == "data:"]
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        for name, of_type in EVENTS[event["type"]].items():
            assert isinstance(event[name], of_type)
    names = {event["type"] for event in events}
    assert {event["item"]["type"] for event in events if "item" in event} == {kind}
    if kind == "function_call":
        deltas = [event["delta"] for event in events if "delta" in event]
        (done,) = [event["arguments"] for event in events if "arguments" in event]
        assert "".join(deltas) == done
        assert {name for name in EVENTS if "function_call" in name} <= names


NOT_HERE = (
    *("/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/audio/transcriptions", "/v1/batches"),
    *("/v1/images/generations", "/v1/responses/x/cancel", "/v1/chat/completions/batch"),
    *("/completion", "/infill", "/embedding", "/apply-template", "/lora-adapters"),
    *("/generate", "/classify", "/pooling", "/invocations", "/inference/v1/generate"),
)
"""What the suites are about that do not count here."""


def test_an_endpoint_that_is_not_here_is_not_found(http: httpx.Client) -> None:
    for path in NOT_HERE:
        answer = http.post(path, json={"prompt": "a", "input": "a"})
        assert answer.status_code == 404
        assert f"there is no {path} here" in answer.json()["error"]["message"]
    error = http.get("/v1/completions").json()["error"]
    assert "/v1/completions does not take GET" in error["message"]
