"""Every field of a request is honoured or refused by name, whichever endpoint it is sent to."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest

from flexinfer.server.protocol.chat import ChatRequest
from flexinfer.server.protocol.completions import CompletionRequest
from flexinfer.server.protocol.responses import ResponsesRequest
from flexinfer.server.protocol.sampling import SamplingFields
from helpers.serving import MODEL

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = [{"role": "user", "content": "Tell me a story."}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "max_completion_tokens": 12, "temperature": 0},
    COMPLETIONS: {"prompt": "Tell me a story.", "max_tokens": 12, "temperature": 0},
    RESPONSES: {"input": "Tell me a story.", "max_output_tokens": 12, "temperature": 0},
}
MODELS = {CHAT: ChatRequest, COMPLETIONS: CompletionRequest, RESPONSES: ResponsesRequest}
HINTS = {
    *("store", "metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier"),
    "include_reasoning",
}
"""Of one endpoint, and without meaning for the answers of the others."""
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def text_of(answer: dict[str, Any]) -> str:
    if "output" in answer:
        return str(answer["output"][0]["content"][0]["text"])
    choice = answer["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def error(http: httpx.Client, path: str, **fields: Any) -> dict[str, Any]:
    answer = http.post(path, json=BODIES[path] | fields)
    assert answer.status_code == 400, answer.text
    found: dict[str, Any] = answer.json()["error"]
    return found


@pytest.mark.parametrize("path", MODELS)
def test_no_field_of_another_endpoint_is_dropped(path: str) -> None:
    known = {name for model in MODELS.values() for name in model.model_fields}
    assert known - set(MODELS[path].model_fields) <= HINTS


@pytest.mark.parametrize("path", MODELS)
@pytest.mark.parametrize(
    "name",
    [
        "kv_transfer_params",
        "functions",
        "stop_regex",
    ],
)
def test_what_is_not_served_is_refused_by_name(path: str, name: str, http: httpx.Client) -> None:
    found = error(http, path, **{name: ["x"]})
    assert found["param"] == name
    assert "not supported" in found["message"]
    assert http.post(path, json=BODIES[path] | {name: None}).status_code == 200


@pytest.mark.parametrize(
    "name",
    ["background", "prompt", "conversation", "max_tool_calls", "response_format"],
)
def test_responses_refuse_what_they_do_not_serve(name: str, http: httpx.Client) -> None:
    assert error(http, RESPONSES, **{name: {"id": "x"}})["param"] == name


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": " "},
        {"min_tokens": 12, "ignore_eos": True, "logit_bias": {"5": 100}},
        {"repetition_penalty": 3.0},
        {"regex": "[ab]{12}", "presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"temperature": 3.0, "top_k": 500, "top_p": 0.99, "min_p": 0.0001, "seed": 5},
        {"structured_outputs": {"choice": ["one"]}},
        {"regex": "[0-9]{4}"},
        {"guided_choice": ["two"]},
        {"json_schema": {"const": 5}},
        {"ebnf": 'root ::= "three" | "four"'},
        {"grammar": 'root ::= ("a" | "b") [0-9]'},
        {"truncate_prompt_tokens": 4},
        {"truncate_prompt_tokens": 4, "truncation_side": "right"},
        {"allowed_token_ids": [70, 71, 72]},
        {"bad_words": ["sorry"]},
    ],
)
def test_responses_honour_what_chats_honour(fields: dict[str, Any], http: httpx.Client) -> None:
    plain, chat, response = (
        http.post(path, json=BODIES[path] | given).json()
        for path, given in ((CHAT, {}), (CHAT, fields), (RESPONSES, fields))
    )
    assert text_of(chat) == text_of(response)
    assert text_of(chat) != text_of(plain)


@pytest.mark.parametrize("path", MODELS)
@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [70], "regex": "[0-9]"},
        {"allowed_token_ids": [2], "min_tokens": 3},
        {"allowed_token_ids": [70, 71], "bad_words": ["a", "b"]},
    ],
)
def test_fields_that_leave_no_token_are_the_callers_fault(
    path: str, fields: dict[str, Any], http: httpx.Client
) -> None:
    """schemathesis found a 500 here."""
    assert "leave no token" in error(http, path, **fields)["message"]


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("completions", {"messages": [{"role": "user", "content": "Hi"}]}, "messages: this field"),
        ("chat/completions", {"prompt": "Hi"}, "prompt: this field is not supported"),
        ("completions", {"max_tokens": 3}, "prompt: Field required"),
    ],
)
def test_a_field_of_another_endpoint_is_told_before_one_that_lacks(
    path: str, body: dict[str, Any], says: str, http: httpx.Client
) -> None:
    error = http.post(f"/v1/{path}", json=body).json()["error"]
    assert error["message"].startswith(says)
    assert error["param"] == says.partition(":")[0]


def test_a_stream_of_the_prompt_alone_counts_no_completion_token(http: httpx.Client) -> None:
    body = {"prompt": "Once", "max_tokens": 0, "echo": True, "return_token_ids": True}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    text = http.post("/v1/completions", json={**body, **usage}).text
    first, *_, last, _ = [line[6:] for line in text.splitlines() if line]
    assert json.loads(first)["choices"][0]["token_ids"] == []
    assert json.loads(last)["usage"]["completion_tokens"] == 0


def test_a_ping_names_all_methods_that_it_takes(http: httpx.Client) -> None:
    assert all(http.request(method, "/ping").status_code == 200 for method in ("HEAD", "POST"))
    answer = http.put("/ping")
    assert (answer.status_code, set(answer.headers["Allow"].split(", "))) == (
        405,
        {"GET", "HEAD", "POST"},
    )


def test_two_structures_exclude_each_other(http: httpx.Client) -> None:
    assert "exclude each other" in error(http, CHAT, regex="a", guided_choice=["b"])["message"]


def test_a_wrong_ebnf_is_refused(http: httpx.Client) -> None:
    assert "EBNF" in error(http, CHAT, structured_outputs={"grammar": "root ::= ("})["message"]


@pytest.mark.parametrize("path", MODELS)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": ["a" * 9000]}, "bad_words"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
def test_what_vllm_refuses_is_refused(
    path: str, fields: dict[str, Any], param: str, http: httpx.Client
) -> None:
    assert error(http, path, **fields)["param"] == param


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "fields",
    [
        {"stop": "a"},
        {"logit_bias": {"5": 1}},
        {"top_k": 5},
        {"min_tokens": 2},
        {"presence_penalty": 1.0},
        {"allowed_token_ids": [5]},
        {"bad_words": ["a"]},
        {"stop_token_ids": [5]},
    ],
)
def test_beams_refuse_what_says_how_to_draw(
    path: str, fields: dict[str, Any], http: httpx.Client
) -> None:
    """What says nothing, such as a client's defaults, is let through."""
    (name,) = fields
    assert error(http, path, use_beam_search=True, n=2, **fields)["param"] == name
    plain = {"top_k": -1, "top_p": 1.0, "presence_penalty": 0.0, "stop": [], "seed": 5}
    body = BODIES[path] | {"use_beam_search": True, "n": 2}
    assert http.post(path, json=body | plain).status_code == 200


def test_beams_show_special_tokens_where_they_are_asked_for(http: httpx.Client) -> None:
    body = {"prompt": "Once upon a time", "use_beam_search": True, "n": 3, "max_tokens": 4}
    hidden, shown = (
        [one["text"] for one in http.post(COMPLETIONS, json=body | fields).json()["choices"]]
        for fields in ({}, {"skip_special_tokens": False})
    )
    assert [text.replace("<|end|>", "") for text in shown] == hidden != shown


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_a_tool_choice_needs_tools(path: str, http: httpx.Client) -> None:
    assert error(http, path, tool_choice="auto")["param"] == "tool_choice"
    assert http.post(path, json=BODIES[path] | {"tool_choice": "none"}).status_code == 200


class Day(pydantic.BaseModel):
    name: Literal["mon", "tue"]


class Week(pydantic.BaseModel):
    days: list[Day] = pydantic.Field(min_length=1, max_length=2)
    first: Day


class Node(pydantic.BaseModel):
    children: list[Node] = pydantic.Field(max_length=1)


def test_required_tools_may_have_nested_models(client: openai.OpenAI) -> None:
    tools = [openai.pydantic_function_tool(model) for model in (Week, Node)]
    for tool in tools:
        tool["function"].pop("strict")
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        tools=tools,
        tool_choice="required",
        max_tokens=400,  # type: ignore[arg-type]
    )
    for call in answer.choices[0].message.tool_calls or ():
        assert call.type == "function"
        model = {"Week": Week, "Node": Node}[call.function.name]
        model.model_validate_json(call.function.arguments)
    assert answer.choices[0].message.tool_calls


# Log probabilities of characters that are cut into several tokens.

TEXT, END = "Zoë 媽 🤗 ab", "<|end|>"
CHOICE = {"structured_outputs": {"choice": [TEXT]}, "temperature": 0, "max_tokens": 40}


def events(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with http.stream("POST", path, json=body | {"stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_bytes_of_tokens_join_to_the_text(http: httpx.Client) -> None:
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, **CHOICE}
    whole = http.post(CHAT, json=body).json()["choices"][0]["logprobs"]["content"]
    streamed = [
        entry
        for event in events(http, CHAT, body)
        for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    for entries in (whole, streamed):
        assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == TEXT + END
        for entry in entries:
            assert entry["bytes"] == entry["top_logprobs"][0]["bytes"] or entry["logprob"] < 0


# What streams say beside the text.


def test_running_usage_begins_with_no_completion_token(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = events(http, CHAT, BODIES[CHAT] | {"stream_options": options})
    counts = [event["usage"]["completion_tokens"] for event in found]
    assert counts[:2] == [0, 1]
    assert counts == sorted(counts)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_running_usage_is_that_of_the_choice_and_the_last_one_of_all(
    path: str, http: httpx.Client
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields = {"stream_options": options, "n": 3, "ignore_eos": True, "return_token_ids": True}
    *found, last = events(http, path, BODIES[path] | fields)
    shown: Counter[int] = Counter()
    for one in found:
        choice = one["choices"][0]
        shown[choice["index"]] += len(choice.get("token_ids") or [])  # several: see StreamPace
        assert one["usage"]["completion_tokens"] == shown[choice["index"]]
        assert one["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"]
    assert shown == {0: 12, 1: 12, 2: 12}
    assert last["usage"]["completion_tokens"] == 36


def test_running_usage_has_the_prompt_of_the_choice(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    prompts = {"prompt": [[5, 6, 7], [8] * 9], "max_tokens": 2, "stream_options": options}
    *found, last = events(http, COMPLETIONS, BODIES[COMPLETIONS] | prompts)
    told = {(e["choices"][0]["index"], e["usage"]["prompt_tokens"]) for e in found}
    assert told == {(0, 3), (1, 9)}
    assert last["usage"]["prompt_tokens"] == 12


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_streams_first_event_has_the_prompts_ids(path: str, http: httpx.Client) -> None:
    body = BODIES[path] | {"return_token_ids": True}
    whole = http.post(path, json=body).json()
    first = events(http, path, body)[0]
    if path == CHAT:
        assert first["prompt_token_ids"] == whole["prompt_token_ids"]
    else:
        ids = whole["choices"][0]["prompt_token_ids"]
        assert ids
        assert first["choices"][0]["prompt_token_ids"] == ids


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_answers_and_events_have_one_fingerprint(path: str, http: httpx.Client) -> None:
    fingerprint = http.post(path, json=BODIES[path]).json()["system_fingerprint"]
    assert fingerprint.startswith("fp_")
    assert {event["system_fingerprint"] for event in events(http, path, BODIES[path])} == {
        fingerprint
    }


def test_a_response_has_the_fields_of_the_standard(http: httpx.Client) -> None:
    answer = http.post(RESPONSES, json={"input": "hi", "max_output_tokens": 2}).json()
    assert (answer["temperature"], answer["top_p"], answer["truncation"]) == (1.0, 1.0, "disabled")
    assert (answer["background"], answer["store"], answer["top_logprobs"]) == (False, True, 0)
    assert (answer["presence_penalty"], answer["frequency_penalty"]) == (0.0, 0.0)
    assert answer["completed_at"] >= answer["created_at"]
    for name in ("max_tool_calls", "reasoning", "safety_identifier", "prompt_cache_key"):
        assert answer[name] is None


def test_items_begin_a_conversation(client: openai.OpenAI, http: httpx.Client) -> None:
    items: Any = [{"type": "message", "role": "system", "content": "Be brief."}]
    made = client.conversations.create(items=items, metadata={"topic": "x"})
    kept = http.get(f"/v1/conversations/{made.id}").json()["messages"]
    assert [(one["role"], one["content"]) for one in kept] == [("system", "Be brief.")]


# Small endpoints.


def test_ping_is_health(http: httpx.Client) -> None:
    assert http.get("/ping").json() == http.post("/ping").json() == http.get("/health").json()


def test_the_tokenizer_tells_of_itself(http: httpx.Client) -> None:
    found = http.get("/tokenizer_info").json()
    assert found["vocab_size"] > 0
    assert "messages" in found["chat_template"]
    assert found["eos_token"]


def test_every_sampling_field_is_in_the_document(http: httpx.Client) -> None:
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    served = {
        name for name, field in SamplingFields.model_fields.items() if "Refused" not in str(field)
    }
    assert {"stop", "regex", "structured_outputs"} <= served & set(
        schemas["ResponsesRequest"]["properties"]
    )
    assert "functions" not in schemas["ChatRequest"]["properties"]
