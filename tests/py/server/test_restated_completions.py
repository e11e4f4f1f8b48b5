"""What the suites of vLLM, SGLang and llama.cpp ask of `/v1/completions`, restated."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import httpx
import pytest

from helpers.endpoint import Endpoint

PATH = "/v1/completions"
BASE: dict[str, Any] = {"prompt": "the the the", "max_tokens": 5, "temperature": 0}
ENDPOINT = Endpoint(PATH, BASE)
ask, stream = ENDPOINT.ask, ENDPOINT.stream


def test_an_answer_has_all_its_parts(http: httpx.Client) -> None:
    answer = ask(http)
    (choice,) = answer["choices"]
    usage = answer["usage"]
    assert (answer["object"], choice["index"]) == ("text_completion", 0)
    assert (choice["finish_reason"], choice["logprobs"]) == ("length", None)
    assert usage["completion_tokens"] == 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + 5


@pytest.mark.parametrize(
    "prompt",
    ["Hello, my name is", [5, 6, 7], ["Hello", "Good day"], [[5, 6, 7], [8, 9]], ["one"]],
)
@pytest.mark.parametrize("n", [1, 2])
def test_every_kind_of_prompt_is_answered_by_n_choices(
    prompt: Any, n: int, http: httpx.Client
) -> None:
    choices = ask(http, prompt=prompt, n=n, temperature=1, seed=3)["choices"]
    num_prompts = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    assert [choice["index"] for choice in choices] == list(range(n * num_prompts))


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_log_probabilities_are_as_many_as_asked_for(num_top: int, http: httpx.Client) -> None:
    found = ask(http, logprobs=num_top)["choices"][0]["logprobs"]
    assert len(found["tokens"]) == len(found["token_logprobs"]) == 5
    assert max(num_top, 1) <= len(found["top_logprobs"][0]) <= num_top + 1
    assert all(one <= 0 for one in found["token_logprobs"])


@pytest.mark.parametrize(("echo", "num_top"), list(product([True, False], [None, 3])))
def test_an_echo_stands_before_the_text(
    echo: bool, num_top: int | None, http: httpx.Client
) -> None:
    plain = ask(http)["choices"][0]["text"]
    choice = ask(http, echo=echo, logprobs=num_top)["choices"][0]
    assert choice["text"] == (BASE["prompt"] if echo else "") + plain
    if num_top is not None:
        assert (choice["logprobs"]["token_logprobs"][0] is None) == echo
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


@pytest.mark.parametrize("num_top", [0, 1, 2])
def test_prompts_are_scored_by_token_id(num_top: int, http: httpx.Client) -> None:
    answer = ask(http, prompt=["A robot", "My name is"], prompt_logprobs=num_top)
    for choice in answer["choices"]:
        first, *others = choice["prompt_logprobs"]
        assert first is None
        for entry in others:
            assert max(1, num_top) <= len(entry) <= num_top + 1
            assert all(token.isdigit() and one["logprob"] <= 0 for token, one in entry.items())


def test_no_scores_are_given_unasked(http: httpx.Client) -> None:
    assert ask(http)["choices"][0]["prompt_logprobs"] is None


@pytest.mark.parametrize(("side", "kept"), [("left", [6, 7, 8]), ("right", [1, 2, 3])])
def test_a_prompt_is_truncated_at_the_side_asked_for(
    side: str, kept: list[int], http: httpx.Client
) -> None:
    fields = {"truncate_prompt_tokens": 3, "truncation_side": side, "return_token_ids": True}
    choice = ask(http, prompt=[1, 2, 3, 4, 5, 6, 7, 8], **fields)["choices"][0]
    assert choice["prompt_token_ids"] == kept


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_prompt_is_truncated_to_what_leaves_room(side: str, http: httpx.Client) -> None:
    """vLLM's -1; the same of what a chat template made."""
    ids = [5] * 1000 + [6] * 1500
    fields: dict[str, Any] = {"truncate_prompt_tokens": -1, "truncation_side": side}
    choice = ask(http, prompt=ids, return_token_ids=True, **fields)["choices"][0]
    assert choice["prompt_token_ids"] == (ids[:2043] if side == "right" else ids[-2043:])
    words = [{"role": "user", "content": "word " * 3000}]
    body = {"messages": words, "max_tokens": 8, "model": "tiny_chat", **fields}
    for path, name in (("/v1/chat/completions", "prompt_tokens"), ("/v1/messages", "input_tokens")):
        usage = http.post(path, json=body).json()["usage"]
        num_cached = usage.get("cache_read_input_tokens", 0)
        assert usage[name] + num_cached == 2040


def test_a_stream_says_what_the_whole_answer_says(http: httpx.Client) -> None:
    events = stream(http)
    text = "".join(event["choices"][0]["text"] for event in events)
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert text == ask(http)["choices"][0]["text"]
    assert [reason for reason in reasons if reason] == [reasons[-1]] == ["length"]
    assert len({event["id"] for event in events}) == 1


def test_streamed_samples_are_told_apart_by_their_index(http: httpx.Client) -> None:
    fields = {"n": 3, "temperature": 1, "seed": 42, "max_tokens": 30}
    texts = ["", "", ""]
    for event in stream(http, **fields):
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == [choice["text"] for choice in ask(http, **fields)["choices"]]
    assert len(set(texts)) == 3


@pytest.mark.parametrize(
    ("options", "has_running", "has_last"),
    [
        ({}, False, False),
        ({"include_usage": False}, False, False),
        ({"include_usage": False, "continuous_usage_stats": True}, False, False),
        ({"include_usage": True}, False, True),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
    ],
)
def test_usage_is_streamed_as_asked_for(
    options: dict[str, bool], has_running: bool, has_last: bool, http: httpx.Client
) -> None:
    events = stream(http, stream_options=options)
    running = [event for event in events if event["choices"]]
    assert all((event.get("usage") is not None) == has_running for event in running)
    assert (len(events) > len(running)) == has_last
    if has_last:
        assert events[-1]["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"ebnf": 'root ::= "Hello" | "Hi" | "Hey"'}, "Hello|Hi|Hey"),
        ({"grammar": 'root ::= "a"{5,5}'}, "a{5}"),
        ({"json_schema": {"const": "42"}}, '"42"'),
        ({"structured_outputs": {"regex": "(x|y){2}z"}}, "[xy]{2}z"),
        ({"structured_outputs": {"choice": ["Python", "Rust"]}}, "Python|Rust"),
        ({"guided_choice": ["Python", "Rust"]}, "Python|Rust"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 7}}}},
            ".",
        ),
        ({"response_format": {"type": "json_object", "schema": {"const": {"a": 1}}}}, ".*1.*"),
    ],
)
def test_structures_hold(fields: dict[str, Any], pattern: str, http: httpx.Client) -> None:
    text = ask(http, max_tokens=40, **fields)["choices"][0]["text"]
    assert re.fullmatch(pattern, text, re.DOTALL)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": 30, "stream": True}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [-1]}, "prompt.0"),
        ({"prompt": [[-1]]}, "prompt.0.0"),
        ({"prompt": [10**6]}, None),
        ({"prompt": "a " * 3000}, "prompt"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 5000}, "prompt"),
        ({"n": 0}, "n"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-320}, "repetition_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1000000": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"stream_options": {"include_usage": None}}, "stream_options"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"min_tokens": 6}, "min_tokens"),
        ({"suffix": "end"}, "suffix"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "sound"}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "schema": 123}}, "response_format.schema"),
        ({"response_format": {"type": "json_object", "schema": {"type": "hiccup"}}}, None),
        ({"structured_outputs": {"regex": "(?=a)b"}}, None),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"json_schema": {"type": "hiccup"}}, None),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    fields: dict[str, Any], param: str | None, http: httpx.Client
) -> None:
    answer = http.post(PATH, json=BASE | fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert param is None or error["param"] == param
    assert error["message"]


@pytest.mark.parametrize(
    "field",
    [
        {"prompt_embeds": "AAAA"},
        {"logprob_token_ids": [1]},
        {"spaces_between_special_tokens": False},
        {"n_predict": 5},
        {"repeat_penalty": 1.3},
        {"top_n_sigma": 1.0},
        {"min_new_tokens": 4},
        {"custom_logit_processor": "x"},
        {"t_max_predict_ms": 100},
        {"return_progress": True},
    ],
)
def test_fields_of_other_servers_are_not_passed_over(
    field: dict[str, Any], http: httpx.Client
) -> None:
    (name,) = field
    answer = http.post(PATH, json=BASE | field)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name


@pytest.mark.parametrize(
    "field",
    [
        {"spaces_between_special_tokens": True},
        {"repeat_penalty": 1.0},
        {"top_n_sigma": -1},
        {"mirostat": 0},
        {"functions": []},
        {"documents": None},
    ],
)
def test_what_they_leave_off_is_let_through(field: dict[str, Any], http: httpx.Client) -> None:
    assert ask(http, **field)["choices"] == ask(http)["choices"]


@pytest.mark.parametrize("include", [True, False])
def test_a_stop_string_ends_the_text(include: bool, http: httpx.Client) -> None:
    text = ask(http, max_tokens=20)["choices"][0]["text"]
    stop = text[4:7]
    fields = {"max_tokens": 20, "stop": stop, "include_stop_str_in_output": include}
    choice = ask(http, **fields)["choices"][0]
    assert choice["text"] == text[: text.index(stop) + (len(stop) if include else 0)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_a_bias_chooses_the_tokens(http: httpx.Client) -> None:
    choice = ask(http, logit_bias={"70": 100}, return_token_ids=True)["choices"][0]
    assert choice["token_ids"] == [70] * 5


def test_a_seed_repeats_itself(http: httpx.Client) -> None:
    first, second, other = (
        ask(http, temperature=1, seed=seed, max_tokens=20)["choices"][0]["text"]
        for seed in (7, 7, 8)
    )
    assert first == second != other
