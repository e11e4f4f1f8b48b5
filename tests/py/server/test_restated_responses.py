"""What Open Responses and the suites of vLLM and llama.cpp ask of `/v1/responses`, restated; and
those of the small endpoints."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from flexinfer import LLM
from helpers.endpoint import Endpoint

PATH = "/v1/responses"
BASE: dict[str, Any] = {"input": "Tell me a story.", "max_output_tokens": 8, "temperature": 0}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
LOGPROBS = ["message.output_text.logprobs"]
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
RESOURCE = {
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model"),
    *("previous_response_id", "instructions", "output", "error", "tools", "tool_choice"),
    *("truncation", "parallel_tool_calls", "text", "top_p", "presence_penalty"),
    *("frequency_penalty", "top_logprobs", "temperature", "reasoning", "usage"),
    *("max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata"),
    *("safety_identifier", "prompt_cache_key"),
}
"""Of Open Responses' schema of a response, what must be there."""
ENDPOINT = Endpoint(PATH, BASE)
ask = ENDPOINT.ask


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["output"][0]["content"][0]["text"])


def stream(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    lines = ENDPOINT.lines(http, **fields)
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line[:5] == "data:"]
    assert names == [event["type"] for event in events]
    return events


def test_a_response_has_every_required_field(http: httpx.Client) -> None:
    answer = ask(http)
    assert set(answer) >= RESOURCE
    assert answer["id"].startswith("resp_")
    (item,) = answer["output"]
    assert item["id"].startswith("msg_")
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("instructions", "Be brief."),
        ("temperature", 0.5),
        ("top_p", 0.5),
        ("presence_penalty", 1.0),
        ("frequency_penalty", 1.0),
        ("max_output_tokens", 3),
        ("metadata", {"a": "b"}),
        ("parallel_tool_calls", False),
        ("store", False),
        ("safety_identifier", "someone"),
        ("prompt_cache_key", "key"),
        ("user", "someone"),
        ("truncation", "disabled"),
        ("tool_choice", "none"),
    ],
)
def test_what_was_asked_is_echoed(field: str, value: Any, http: httpx.Client) -> None:
    assert ask(http, **{field: value})[field] == value


def test_tools_are_echoed_whole(http: httpx.Client) -> None:
    answer = ask(http, tools=[TOOL], tool_choice="auto")
    assert {"type", "name", "description", "parameters", "strict"} <= set(answer["tools"][0])


@pytest.mark.parametrize(
    "given",
    [
        [{"role": "user", "content": "Tell me a story."}],
        [{"type": "message", "role": "user", "content": "Tell me a story."}],
        [{"role": "user", "content": [{"type": "input_text", "text": "Tell me a story."}]}],
    ],
)
def test_every_shape_of_input_is_the_same(given: Any, http: httpx.Client) -> None:
    assert text_of(ask(http, input=given)) == text_of(ask(http))


def test_events_come_in_order_and_end_with_the_response(http: httpx.Client) -> None:
    events = stream(http)
    types = [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert types[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert types[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    last = events[-1]["response"]
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == text_of(last) == text_of(ask(http))
    items = {event["item_id"] for event in events if "item_id" in event}
    assert items == {last["output"][0]["id"]}
    assert set(events[0]["response"]) >= RESOURCE


@pytest.mark.parametrize("num_top", [None, 0, 3])
def test_log_probabilities_are_those_of_a_chat(num_top: int | None, http: httpx.Client) -> None:
    fields = {"include": LOGPROBS, "top_logprobs": num_top}
    answer = ask(http, **fields)
    found = answer["output"][0]["content"][0]["logprobs"]
    messages = [{"role": "user", "content": BASE["input"]}]
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, "logprobs": True}
    chat = http.post("/v1/chat/completions", json=body | {"top_logprobs": num_top}).json()
    assert found == chat["choices"][0]["logprobs"]["content"]
    assert answer["top_logprobs"] == (num_top or 0)
    events = stream(http, **fields)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [one for event in deltas for one in event["logprobs"]] == found
    (done,) = (event for event in events if event["type"] == "response.output_text.done")
    assert done["logprobs"] == found
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == found


def test_a_response_is_retrieved_and_continued_and_deleted(http: httpx.Client) -> None:
    first = ask(http, input="My name is Ann.")
    where = f"{PATH}/{first['id']}"
    assert http.get(where).json()["output"] == first["output"]
    second = ask(http, input="And yours?", previous_response_id=first["id"])
    assert second["usage"]["input_tokens"] > first["usage"]["total_tokens"]
    assert http.delete(where).json()["deleted"]
    assert http.get(where).status_code == 404


def test_what_is_not_stored_is_not_found(http: httpx.Client) -> None:
    assert http.get(f"{PATH}/{ask(http, store=False)['id']}").status_code == 404


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"type": "text"}, ".*"),
        ({"type": "json_schema", "name": "x", "schema": {"const": "foooooo"}}, '"foooooo"'),
        ({"type": "json_object"}, r"\{.*"),
    ],
)
def test_text_formats_hold(form: dict[str, Any], pattern: str, http: httpx.Client) -> None:
    answer = ask(http, text={"format": form}, max_output_tokens=30)
    assert re.fullmatch(pattern, text_of(answer), re.DOTALL)
    assert answer["text"]["format"]["type"] == form["type"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "reasoning", "id": "x", "summary": "y"}]}, None),
        ({"input": [{"role": "robot", "content": "x"}]}, "input.0.message.role"),
        ({"input": [{"type": "function_call"}]}, None),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, None),
        ({"text": {"format": {"type": "sound"}}}, "text.format.type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"background": True}, "background"),
        ({"background": True, "store": False}, "background"),
        ({"conversation": "conv_x"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"top_logprobs": 21, "include": LOGPROBS}, "top_logprobs"),
        ({"include": LOGPROBS, "tools": [TOOL], "tool_choice": "auto"}, "include"),
        ({"truncation": "auto"}, "truncation"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "web_search"}]}, None),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"temperature": "warm"}, "temperature"),
        ({"metadata": {"a": 5}}, None),
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


ASKED = {"role": "user", "content": [{"type": "input_text", "text": "Tell me a story."}]}
SAID = {"role": "assistant", "content": [{"type": "output_text", "text": "Once upon a time"}]}
THOUGHT: dict[str, Any] = {"type": "reasoning", "summary": [], "encrypted_content": None}
CALLED = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c"}


@pytest.mark.parametrize(
    "given",
    [
        [ASKED, SAID, ASKED],
        [ASKED, {**SAID, "type": "message", "id": "msg_1", "status": "completed"}, ASKED],
        [ASKED, SAID, THOUGHT, ASKED],
        [ASKED, {**THOUGHT, "id": "rs_1", "status": "completed"}, SAID, ASKED],
        [ASKED, CALLED, {**RESULT, "output": "noon"}],
        [ASKED, CALLED, {**RESULT, "output": [{"type": "input_text", "text": "noon"}]}],
    ],
)
def test_what_was_said_before_is_read_in_every_shape(given: Any, http: httpx.Client) -> None:
    answer = ask(http, input=given)
    assert answer["usage"]["input_tokens"] > ask(http, input=[ASKED])["usage"]["input_tokens"]
    assert text_of(answer)


def test_two_responses_go_on_from_one_without_its_instructions(http: httpx.Client) -> None:
    first = ask(http, input="My name is Ann.", instructions="Say little. " * 9)
    second, third = (
        ask(http, input=text, previous_response_id=first["id"]) for text in ("And?", "And?")
    )
    assert text_of(second) == text_of(third)
    before = first["usage"]["input_tokens"] + first["usage"]["output_tokens"]
    assert second["usage"]["input_tokens"] < before


@pytest.mark.parametrize(
    "fields", [{}, {"tools": [TOOL], "tool_choice": "required", "max_output_tokens": 60}]
)
def test_whatever_a_stream_opens_it_closes(fields: dict[str, Any], http: httpx.Client) -> None:
    closes = {"output_text.delta": "output_text.done", "content_part.added": "content_part.done"}
    closes |= {"output_item.added": "output_item.done", "created": "completed"}
    closes["function_call_arguments.delta"] = "function_call_arguments.done"
    opened: list[str] = []
    for event in stream(http, stream_options={"include_usage": True}, **fields):
        kind = event["type"].removeprefix("response.").replace("incomplete", "completed")
        if kind in closes and opened[-1:] != [closes[kind]]:
            opened.append(closes[kind])
        elif kind in closes.values():
            assert opened.pop() == kind
    assert not opened


def test_what_it_continues_must_be_there(http: httpx.Client) -> None:
    answer = http.post(PATH, json=BASE | {"previous_response_id": "resp_x"})
    assert answer.status_code == 404
    assert answer.json()["error"]["param"] == "previous_response_id"


# The small endpoints.


@pytest.mark.parametrize("special", [True, False])
def test_tokens_and_texts_turn_into_each_other(special: bool, http: httpx.Client) -> None:
    body = {"prompt": "Hello, world", "add_special_tokens": special}
    found = http.post("/tokenize", json=body).json()
    assert found["count"] == len(found["tokens"])
    text = http.post("/detokenize", json={"tokens": found["tokens"]}).json()["prompt"]
    assert text == "Hello, world"


def test_tokens_are_named_if_asked_for(http: httpx.Client) -> None:
    body = {"prompt": "Hello, world", "return_token_strs": True}
    found = http.post("/tokenize", json=body).json()
    assert len(found["token_strs"]) == found["count"]


def test_a_chat_is_tokenized_as_the_model_reads_it(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    found = http.post("/tokenize", json={"messages": messages}).json()
    body = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
    chat = http.post("/v1/chat/completions", json=body).json()
    assert found["tokens"] == chat["prompt_token_ids"]


@pytest.mark.parametrize("tools", [None, [FUNCTION]])
@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({"add_generation_prompt": True}, None),
        ({"add_generation_prompt": False}, None),
        ({"add_generation_prompt": False, "continue_final_message": True}, "Sure,"),
    ],
)
def test_every_way_to_end_a_prompt_is_tokenized(
    fields: dict[str, bool], end: str | None, tools: Any, http: httpx.Client, offline: LLM
) -> None:
    """With tools as they are told to a template that knows none, in words before all else."""
    messages = [{"role": "user", "content": "Hi there!"}]
    messages += [{"role": "assistant", "content": end}] if end else []
    body = {"messages": messages, "tools": tools, **fields}
    found = http.post("/tokenize", json=body).json()
    tokenizer = offline.get_tokenizer()
    text = tokenizer.apply_chat_template(messages, tokenize=False, **fields)
    told = tokenizer.decode(found["tokens"])
    assert told == text if tools is None else told.endswith(text[-20:])
    assert ('"name": "f"' in told) == (tools is not None)
    assert found["max_model_len"] == offline.llm_engine.max_model_len


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}),
        ("/tokenize", {"prompt": 5}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [10**6]}),
    ],
)
def test_what_is_no_text_and_no_token_is_refused(
    path: str, body: dict[str, Any], http: httpx.Client
) -> None:
    assert http.post(path, json=body).status_code == 400


def test_models_are_listed_and_told(http: httpx.Client) -> None:
    (model,) = http.get("/v1/models").json()["data"]
    assert http.get(f"/v1/models/{model['id']}").json() == model
    assert model["max_model_len"] == 2048
    assert http.get("/v1/models/gpt-x").status_code == 404
