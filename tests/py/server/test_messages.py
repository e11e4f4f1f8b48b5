"""The real `anthropic` client at /v1/messages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

anthropic = pytest.importorskip("anthropic")

from flexinfer import LLM, SamplingParams
from flexinfer.async_llm import AsyncLLM
from helpers.scripted import say
from helpers.serving import MODEL, ServerProcess, serving, settings

CHAT: Any = [{"role": "user", "content": "Hello"}]
WEATHER: Any = {
    "name": "weather",
    "description": "The weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
GREEDY: Any = {"temperature": 0.0}
"""No parameter of newer clients."""
PLAIN: Any = {"model": MODEL, "max_tokens": 30, "messages": CHAT}
ASK: Any = {**PLAIN, "extra_body": GREEDY}


@pytest.fixture(scope="module")
def claude(server: ServerProcess) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def expected(offline: LLM, chat: Any = CHAT, **params: Any) -> str:
    given = {"temperature": 0.0, "max_tokens": 30, **params}
    (output,) = offline.chat(chat, SamplingParams(**given), use_tqdm=False)
    return output.outputs[0].text


def test_it_says_what_the_offline_engine_says(claude: Any, offline: LLM) -> None:
    answer = claude.messages.create(**ASK)
    (block,) = answer.content
    assert block.type == "text"
    assert block.text == expected(offline)
    assert answer.stop_reason == "end_turn"
    assert answer.id.startswith("msg_")
    total = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    assert total == claude.messages.count_tokens(model=MODEL, messages=CHAT).input_tokens


def test_a_system_prompt_and_blocks_are_read(claude: Any, offline: LLM) -> None:
    system: Any = [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]
    blocks: Any = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    answer: Any = claude.messages.create(**{**ASK, "system": system, "messages": blocks})
    chat = [{"role": "system", "content": "Be kind."}, *CHAT]
    assert answer.content[0].text == expected(offline, chat)


def test_an_answer_that_was_begun_goes_on(claude: Any, offline: LLM) -> None:
    whole = expected(offline)
    begun = [*CHAT, {"role": "assistant", "content": whole[:5]}]
    answer: Any = claude.messages.create(**{**ASK, "messages": begun})
    assert answer.content[0].text  # not a turn of its own: the template would have ended it


def test_events_come_in_anthropics_order(server: ServerProcess, offline: LLM) -> None:
    answer = httpx.post(
        f"{server.url}/v1/messages", json={**PLAIN, **GREEDY, "stream": True}, timeout=60
    )
    events = [one.split("\n") for one in answer.text.strip().split("\n\n")]
    names = [name.removeprefix("event: ") for name, _ in events]
    bodies = [json.loads(data.removeprefix("data: ")) for _, data in events]
    assert [body["type"] for body in bodies] == names
    assert names[:3] == ["message_start", "content_block_start", "ping"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert bodies[0]["message"]["usage"]["output_tokens"] >= 1
    assert bodies[0]["message"]["content"] == []
    text = "".join(body["delta"]["text"] for body in bodies[3:-3])
    assert text == expected(offline)
    assert bodies[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert bodies[-2]["usage"]["output_tokens"] > 1


def test_the_streaming_helper_gets_the_same_message(claude: Any) -> None:
    whole = claude.messages.create(**ASK)
    with claude.messages.stream(**ASK) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text  # type: ignore[union-attr]
        streamed = stream.get_final_message()
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens


def test_the_async_client_works(server: ServerProcess, offline: LLM) -> None:
    async def ask() -> Any:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none") as client:
            return await client.messages.create(**ASK)

    assert asyncio.run(ask()).content[0].text == expected(offline)


def test_it_says_why_it_stopped(claude: Any, offline: LLM) -> None:
    cut = claude.messages.create(**{**ASK, "max_tokens": 2})
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
    word = expected(offline).split()[1]
    stopped = claude.messages.create(**ASK, stop_sequences=[word])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)


def test_more_than_fits_ends_where_the_context_does(claude: Any) -> None:
    long: Any = [{"role": "user", "content": "a " * 1010}]
    num_tokens = claude.messages.count_tokens(model=MODEL, messages=long).input_tokens
    assert num_tokens < 2048
    answer = claude.messages.create(**{**ASK, "max_tokens": 8000, "messages": long})
    full = answer.stop_reason == "model_context_window_exceeded"
    assert full == (answer.usage.output_tokens == 2048 - num_tokens)
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .* maximum context"):
        claude.messages.create(**{**ASK, "messages": long * 3})


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_tool_is_used_and_its_result_read(claude: Any, choice: Any) -> None:
    ask = {**ASK, "max_tokens": 200, "tools": [WEATHER], "tool_choice": choice}
    whole = claude.messages.create(**ask)
    with claude.messages.stream(**ask) as stream:
        pieces = [e.partial_json for e in stream if e.type == "input_json"]
        streamed = stream.get_final_message()
    assert len(pieces) > 2
    for answer in (whole, streamed):
        (block,) = [one for one in answer.content if one.type == "tool_use"][:1]
        assert answer.stop_reason == "tool_use"
        assert block.input["city"] in ("Paris", "Rome")
        assert block.input["days"] in (1, 2, 3)
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
    turns: Any = [
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": [result]},
    ]
    after = claude.messages.create(**{**ASK, "messages": [*CHAT, *turns], "tools": [WEATHER]})
    assert after.stop_reason in ("end_turn", "max_tokens")


def test_tools_may_be_forbidden(claude: Any) -> None:
    none: Any = {"type": "none"}
    count = claude.messages.count_tokens
    plain = count(model=MODEL, messages=CHAT).input_tokens
    assert (
        count(model=MODEL, messages=CHAT, tools=[WEATHER], tool_choice=none).input_tokens == plain
    )
    assert count(model=MODEL, messages=CHAT, tools=[WEATHER]).input_tokens > plain


def test_a_schema_is_kept(claude: Any) -> None:
    form: Any = {"format": {"type": "json_schema", "schema": WEATHER["input_schema"]}}
    answer: Any = claude.messages.create(**{**ASK, "max_tokens": 200, "output_config": form})
    assert json.loads(answer.content[0].text)["city"] in ("Paris", "Rome")


IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}
UNTYPED_RESULT = {"type": "tool_result", "tool_use_id": "a", "content": [{"text": "x"}]}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "'image' are not supported"),
        ({"messages": [{"role": "user", "content": [UNTYPED_RESULT]}]}, "content.0.type: Field"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": []}]}, "nothing in them"),
        ({"tool_choice": {"type": "any"}}, "only allowed with tools"),
        ({"max_tokens": None}, "max_tokens"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "web_search_20250305"),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
            "no",
        ),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "'x'"),
    ],
)
def test_what_is_refused_has_anthropics_shape(
    http: httpx.Client, fields: dict[str, Any], says: str
) -> None:
    answer = http.post("/v1/messages", json={**PLAIN, **fields})
    assert answer.status_code == 400
    body = answer.json()
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert says in body["error"]["message"]
    assert "other" not in body["error"]["message"]
    assert "\n" not in body["error"]["message"]


def test_errors_are_the_clients_exceptions(claude: Any) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        claude.messages.create(**{**ASK, "model": "claude"})
    assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


@pytest.fixture(scope="module")
def keyed_url(llm: AsyncLLM) -> Iterator[str]:
    with serving(llm, settings(api_keys=("secret",))) as url:
        yield url


def test_x_api_key_is_a_key(keyed_url: str) -> None:
    def client(**key: str) -> Any:
        return anthropic.Anthropic(base_url=keyed_url, max_retries=0, **key)  # type: ignore[arg-type]

    assert client(api_key="secret").messages.create(**ASK).content
    assert client(auth_token="secret").messages.create(**ASK).content
    with pytest.raises(anthropic.AuthenticationError) as caught:
        client(api_key="wrong").messages.create(**ASK)
    assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


def test_a_stream_that_fails_ends_by_an_error_event(
    keyed_url: str, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, llm, "Hello there")
    good = llm.generate

    async def generate(*args: Any, **fields: Any) -> Any:
        async for output in good(*args, **fields):
            if output.finished:
                raise RuntimeError("broken")
            yield output

    monkeypatch.setattr(llm, "generate", generate)
    client = anthropic.Anthropic(base_url=keyed_url, api_key="secret", max_retries=0)
    with pytest.raises(anthropic.APIStatusError, match="internal error"):
        list(client.messages.create(**ASK, stream=True))
