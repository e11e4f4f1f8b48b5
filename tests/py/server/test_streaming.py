"""Server-sent events: what is written by a short cut equals what the encoder writes."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")
from hypothesis import given, settings
from hypothesis import strategies as st

from flexinfer.outputs import CompletionOutput, RequestMetrics, RequestOutput
from flexinfer.sampling.params import SamplingParams
from flexinfer.server.api.chat_call import ChatCall
from flexinfer.server.api.chat_stream import ChatStream
from flexinfer.server.api.completion_call import CompletionCall
from flexinfer.server.api.completion_stream import CompletionStream
from flexinfer.server.api.generate import Job
from flexinfer.server.api.reading import Reading
from flexinfer.server.api.tools import tool_use
from flexinfer.server.http.streaming import EventStream, TextEvents, event
from flexinfer.server.protocol.chat import ChatRequest
from flexinfer.server.protocol.completions import Completion, CompletionRequest
from flexinfer.server.token_bytes import TokenBytes

PROMPT: Any = {"prompt_token_ids": [1, 2, 3], "cache_salt": ""}
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
OPTIONS = st.fixed_dictionaries(
    {"model": st.just('a "model"\\'), "n": st.integers(1, 3)},
    optional={"stream_options": st.sampled_from([{}, {"include_usage": True}])},
)


def pieces_of(texts: list[str], num_samples: int) -> list[RequestOutput]:
    """One output a text, of one sample after the other; each sample has an end."""
    tail = [(index, "", "length") for index in range(num_samples)]
    said = [(at % num_samples, text, None) for at, text in enumerate(texts)]
    return [
        RequestOutput(
            request_id="r",
            prompt=None,
            prompt_token_ids=[1, 2, 3],
            outputs=[CompletionOutput(index, text, [7], finish_reason=reason)],  # type: ignore[arg-type]
            finished=reason is not None and index == num_samples - 1,
            metrics=RequestMetrics(0.0),
        )
        for index, text, reason in said + tail
    ]


STATE: Any = SimpleNamespace(
    settings=SimpleNamespace(model_name="m", enable_force_include_usage=False),
    fingerprint="fp",
    token_bytes=TokenBytes(None),
)


def completion_call(options: dict[str, Any]) -> CompletionCall:
    body = CompletionRequest(prompt=[1, 2, 3], stream=True, **options)
    job = Job("cmpl-1", "", [PROMPT], SamplingParams(n=options["n"]))
    return CompletionCall(STATE, body, job, [], created=5)


def chat_call(options: dict[str, Any]) -> ChatCall:
    body = ChatRequest(messages=[{"role": "user", "content": "hi"}], stream=True, **options)
    job = Job("chatcmpl-1", "", [PROMPT], SamplingParams(n=options["n"]))
    reading = Reading(STATE, tool_use(STATE, None, None, None))
    return ChatCall(STATE, body, job, reading, body.messages, created=5)


@given(TEXTS, st.integers(0, 3), st.text(max_size=5))
def test_an_event_that_differs_in_its_text_is_what_the_encoder_writes(
    text: str, index: int, name: str
) -> None:
    def make(index: int, text: str) -> dict[str, Any]:
        return {"model": name, "choices": [{"index": index, "text": text, "end": None}], "n": 1}

    events = TextEvents(make)
    for each in (text, "", text + "\u2028\x00"):
        assert events.event(index, each) == event(make(index, each))


@settings(max_examples=60, deadline=None)
@given(st.lists(TEXTS, max_size=8), OPTIONS)
def test_streams_write_plain_events_as_they_write_all_others(
    texts: list[str], options: dict[str, Any]
) -> None:
    outputs = pieces_of(texts, options["n"])
    fast, slow = (CompletionStream(completion_call(options)) for _ in range(2))
    slow._has_plain = False
    assert [fast.add(0, one) for one in outputs] == [slow.add(0, one) for one in outputs]
    assert fast.finish() == slow.finish()
    fast_chat, slow_chat = (ChatStream(chat_call(options)) for _ in range(2))
    slow_chat._has_plain = False
    assert [fast_chat.add(one) for one in outputs] == [slow_chat.add(one) for one in outputs]
    assert fast_chat.finish() == slow_chat.finish()


@settings(max_examples=30, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=8), OPTIONS)
def test_a_streams_events_are_completions_that_join_to_the_text(
    texts: list[str], options: dict[str, Any]
) -> None:
    stream = CompletionStream(completion_call(options))
    sent = "".join(stream.add(0, one) for one in pieces_of(texts, options["n"]))
    said = [""] * options["n"]
    for body in sent.split("\n\n")[:-1]:
        chunk = Completion.model_validate_json(body.removeprefix("data: "))
        (choice,) = chunk.choices
        said[choice.index] += choice.text
        assert (chunk.id, chunk.model, chunk.created) == ("cmpl-1", options["model"], 5)
    assert said == ["".join(texts[index :: options["n"]]) for index in range(options["n"])]
    usage = stream.finish().removesuffix("data: [DONE]\n\n")
    if options.get("stream_options"):
        used = json.loads(usage.removeprefix("data: "))["usage"]
        assert used["completion_tokens"] == len(texts) + options["n"]
    else:
        assert usage == ""


# A reader that takes nothing.


def answer_of(events: EventStream, blocked_at: int, sent: list[Any]) -> None:
    """Send it to a reader that takes nothing from its message `blocked_at` on."""

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Any) -> None:
        if len(sent) == blocked_at:
            await asyncio.Event().wait()
        sent.append(message)

    asyncio.run(events({"state": {"log": {}}}, receive, send))


@pytest.mark.parametrize("blocked_at", [0, 1, 3, 5])
def test_a_reader_that_takes_nothing_is_cut_off_and_its_events_end(blocked_at: int) -> None:
    ended = []

    async def rest() -> Any:
        try:
            for index in range(3):
                await asyncio.sleep(0.03)  # longer than the timeout, if all waits were added up
                yield f"{index}"
        finally:
            ended.append(True)

    sent: list[Any] = []
    answer_of(EventStream("first", rest(), send_timeout_s=0.05), blocked_at, sent)
    assert len(sent) == blocked_at
    assert ended or blocked_at < 3  # what never began has nothing to end


def test_waiting_for_the_engine_is_no_slow_reader() -> None:
    async def rest() -> Any:
        await asyncio.sleep(0.2)
        yield "second"

    sent: list[Any] = []
    answer_of(EventStream("first", rest(), send_timeout_s=0.02), -1, sent)
    assert b"".join(message.get("body", b"") for message in sent) == b"firstsecond"


def test_a_panic_between_two_events_is_the_last_event() -> None:
    class PanicException(BaseException):
        """As pyo3 makes one for each library."""

    async def rest() -> Any:
        yield "second"
        raise PanicException("index out of bounds")

    sent: list[Any] = []
    answer_of(EventStream("first", rest(), send_timeout_s=5), -1, sent)
    first, second, error, end = [message["body"] for message in sent[1:]]
    assert (first, second, end) == (b"first", b"second", b"")
    assert b'"error"' in error
