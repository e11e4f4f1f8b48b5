"""What the suites of vLLM, SGLang and llama.cpp ask of `/v1/chat/completions`, restated."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from helpers.endpoint import Endpoint

PATH = "/v1/chat/completions"
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
BASE: dict[str, Any] = {
    "messages": [SYSTEM, {"role": "user", "content": "Tell me a story."}],
    "max_completion_tokens": 10,
    "temperature": 0,
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ENDPOINT = Endpoint(PATH, BASE)
ask, stream = ENDPOINT.ask, ENDPOINT.stream


def content(http: httpx.Client, **fields: Any) -> str:
    return str(ask(http, **fields)["choices"][0]["message"]["content"])


def test_an_answer_has_all_its_parts(http: httpx.Client) -> None:
    answer = ask(http)
    (choice,) = answer["choices"]
    assert answer["object"] == "chat.completion"
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 10
    assert answer["prompt_logprobs"] is None


def test_a_dialogue_goes_on(http: httpx.Client) -> None:
    said = {"role": "assistant", "content": content(http)}
    more = {"role": "user", "content": "And then?"}
    assert content(http, messages=[*BASE["messages"], said, more]) is not None


@pytest.mark.parametrize(
    "text",
    [
        [{"type": "text", "text": "Tell me a story."}],
        [{"type": "input_text", "text": "Tell me a story."}],
    ],
)
def test_text_may_come_in_parts(text: Any, http: httpx.Client) -> None:
    messages = [SYSTEM, {"role": "user", "content": text}]
    assert content(http, messages=messages) == content(http)


@pytest.mark.parametrize(
    ("fields", "num_top"),
    [
        ({"logprobs": False}, None),
        ({"logprobs": None}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_log_probabilities_are_as_many_as_asked_for(
    fields: dict[str, Any], num_top: int | None, http: httpx.Client
) -> None:
    whole = ask(http, **fields)["choices"][0]["logprobs"]
    events = [event["choices"][0].get("logprobs") for event in stream(http, **fields)]
    streamed = [entry for found in events if found for entry in found["content"]]
    if num_top is None:
        assert whole is None
        assert not streamed
        return
    assert streamed == whole["content"]
    assert all(len(entry["top_logprobs"]) == num_top for entry in whole["content"])
    assert all(entry["logprob"] <= 0 and entry["bytes"] for entry in whole["content"])


@pytest.mark.parametrize("num_top", [0, 1, 2])
def test_the_prompt_is_scored(num_top: int, http: httpx.Client) -> None:
    answer = ask(http, prompt_logprobs=num_top)
    first, *others = answer["prompt_logprobs"]
    assert first is None
    assert len(others) == answer["usage"]["prompt_tokens"] - 1
    assert all(max(1, num_top) <= len(entry) <= num_top + 1 for entry in others)


def test_a_stream_says_what_the_whole_answer_says(http: httpx.Client) -> None:
    first, *others = events = stream(http)
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert not any(event["choices"][0]["delta"].get("role") for event in others)
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert text == content(http)
    assert [reason for reason in reasons if reason] == [reasons[-1]] == ["length"]
    assert len({(event["id"], event["system_fingerprint"]) for event in events}) == 1


@pytest.mark.parametrize(
    ("options", "has_running", "has_last"),
    [
        ({}, False, False),
        ({"include_usage": False}, False, False),
        ({"include_usage": True, "continuous_usage_stats": False}, False, True),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
    ],
)
def test_usage_is_streamed_as_asked_for(
    options: dict[str, bool], has_running: bool, has_last: bool, http: httpx.Client
) -> None:
    events = stream(http, stream_options=options, min_tokens=10)
    running = [event for event in events if event["choices"]]
    assert all((event.get("usage") is not None) == has_running for event in running)
    assert (len(events) > len(running)) == has_last
    if has_last:
        assert events[-1]["usage"]["completion_tokens"] == 10


@pytest.mark.parametrize("n", [1, 3])
def test_samples_are_told_apart(n: int, http: httpx.Client) -> None:
    fields = {"n": n, "temperature": 1, "seed": 4}
    whole = ask(http, **fields)["choices"]
    texts = [""] * n
    for event in stream(http, **fields):
        choice = event["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == [choice["message"]["content"] for choice in whole]


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"choice": ["Python", "Rust"]}}, "Python|Rust"),
        ({"structured_outputs": {"json": {"const": {"a": 1}}}}, r"\{.*\}"),
        ({"structured_outputs": {"regex": r"\d{3}-\d{2}"}}, r"\d{3}-\d{2}"),
        ({"structured_outputs": {"grammar": 'root ::= "a" "b"'}}, "ab"),
        ({"structured_outputs": {"json_object": True}, "stop": ["zz"]}, r"[\[{\"0-9tfn-].*"),
        ({"response_format": {"type": "json_object", "schema": {"const": "42"}}}, '"42"'),
        ({"response_format": {"type": "text"}}, ".*"),
        ({"json_schema": {"const": "42"}}, '"42"'),
        ({"grammar": 'root ::= "a"{5,5}'}, "a{5}"),
        ({"regex": "yes|no"}, "yes|no"),
        ({"ebnf": 'root ::= "Hello" | "Hi"'}, "Hello|Hi"),
    ],
)
def test_structures_hold(fields: dict[str, Any], pattern: str, http: httpx.Client) -> None:
    text = content(http, max_completion_tokens=60, **fields)
    assert re.fullmatch(pattern, text, re.DOTALL)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21, "stream": True}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "string"}, "messages"),
        ({"messages": [123]}, "messages.0"),
        ({"messages": [{}]}, "messages.0.role"),
        ({"messages": [{"role": 123}]}, "messages.0.role"),
        ({"messages": [{"role": "system", "content": 123}]}, "messages.0.content"),
        ({"messages": [SYSTEM, {}]}, "messages.1.role"),
        ({"messages": [{"role": "user", "content": "a " * 9000}]}, "messages"),
        ({"stream_options": {"include_usage": None}}, "stream_options"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
        ),
        ({"tools": [TOOL], "tool_choice": {}}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "browser"}]}, None),
        ({"logit_bias": {"1000000": 1}}, "logit_bias"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"add_generation_prompt": True, "continue_final_message": True}, None),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, None),
        ({"response_format": {"type": "json_object", "schema": 123}}, "response_format.schema"),
        ({"structured_outputs": {"json": {"type": "hiccup"}}}, None),
        ({"structured_outputs": {"json": {"$ref": "http://localhost/x"}}}, None),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"documents": [{"text": "x"}]}, "documents"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"echo": True}, "echo"),
        ({"prompt": "x"}, "prompt"),
        ({"model": 5}, "model"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"n": 10_000}, "n"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    fields: dict[str, Any], param: str | None, http: httpx.Client
) -> None:
    answer = http.post(PATH, json=BASE | fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert param is None or error["param"] == param
    assert "\n" not in error["message"]
    assert "multiple values" not in error["message"]


@pytest.mark.parametrize("body", ["[]", '"text"', "5", "null", "", "{", "nothing"])
def test_a_body_that_is_no_object_is_refused(body: str, http: httpx.Client) -> None:
    answer = http.post(PATH, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_an_unknown_model_is_not_found(http: httpx.Client) -> None:
    answer = http.post(PATH, json=BASE | {"model": "gpt-x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_what_the_assistant_began_is_gone_on_with(http: httpx.Client) -> None:
    begun = [*BASE["messages"], {"role": "assistant", "content": "Once there was"}]
    fields = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False}
    answer = ask(http, return_token_ids=True, **fields)
    plain = ask(http, messages=begun, return_token_ids=True)
    assert len(answer["prompt_token_ids"]) < len(plain["prompt_token_ids"])


def test_a_null_tool_choice_is_none_given(http: httpx.Client) -> None:
    assert content(http, tool_choice=None, tools=None) == content(http)


def test_what_is_wrong_is_named(http: httpx.Client) -> None:
    def message(**fields: Any) -> str:
        answer = http.post(PATH, json=BASE | fields)
        assert answer.status_code == 400
        return str(answer.json()["error"]["message"])

    both = message(logit_bias={"bad1": 50, "-2": 20, "5": 1})
    assert "'bad1', '-2'" in both
    beyond = message(logit_bias={"1025": 1})
    assert "1025" in beyond
    assert "1024" in beyond
    assert "look-around" in message(structured_outputs={"regex": "(?!x)a"})


def test_fields_of_messages_that_nobody_knows_are_passed_over(http: httpx.Client) -> None:
    """As in vLLM."""
    messages = [{**message, "extra_field": "0"} for message in BASE["messages"]]
    assert content(http, messages=messages) == content(http)


@pytest.mark.parametrize("num_top", [None, 5])
@pytest.mark.parametrize("n", [1, 2])
def test_every_choice_of_a_stream_begins_and_ends_once(
    num_top: int | None, n: int, http: httpx.Client
) -> None:
    fields = {"n": n, "logprobs": num_top is not None, "top_logprobs": num_top}
    *events, last = stream(http, **fields, stream_options={"include_usage": True})
    for index in range(n):
        parts = [one for event in events for one in event["choices"] if one["index"] == index]
        assert [part["delta"].get("role") for part in parts].count("assistant") == 1
        assert sum(part["finish_reason"] is not None for part in parts) == 1
        entries = [
            entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]
        ]
        assert len(entries) == (0 if num_top is None else 10)
        assert all(len(entry["top_logprobs"]) == num_top for entry in entries)
    assert last["usage"]["completion_tokens"] == 10 * n


@pytest.mark.parametrize("arguments", ["{}", ""])
def test_a_call_without_arguments_goes_back(arguments: str, http: httpx.Client) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": "noon"}
    assert content(http, messages=[*BASE["messages"], said, result], tools=[TOOL])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_forced_call_that_cannot_begin_is_no_text(choice: Any, http: httpx.Client) -> None:
    fields = {"tools": [TOOL], "tool_choice": choice, "max_completion_tokens": 1}
    (found,) = ask(http, **fields)["choices"]
    assert found["finish_reason"] == "length"
    assert not found["message"]["content"]
    assert (found["message"]["tool_calls"] is None) == (choice == "required")
