"""LangChain's ChatOpenAI works against the server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("langchain_openai")

from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from flexinfer import LLM, SamplingParams
from helpers.serving import MODEL, ServerProcess


def model(server: ServerProcess, **fields: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL, base_url=f"{server.url}/v1", api_key="none", temperature=0, **fields
    )


def expected(offline: LLM) -> str:
    chat: Any = [{"role": "user", "content": "Hello"}]
    params = SamplingParams(temperature=0, max_tokens=30)
    (output,) = offline.chat(chat, params, use_tqdm=False)
    return output.outputs[0].text


def test_it_answers_streams_and_batches(server: ServerProcess, offline: LLM) -> None:
    chat = model(server, max_tokens=30)
    answer = chat.invoke("Hello")
    assert answer.content == expected(offline)
    assert answer.usage_metadata["total_tokens"] > 0
    assert "".join(str(part.content) for part in chat.stream("Hello")) == answer.content
    assert [one.content for one in chat.batch(["Hello"] * 3)] == [answer.content] * 3
    assert asyncio.run(chat.ainvoke("Hello")).content == answer.content


def test_it_gets_structured_output(server: ServerProcess) -> None:
    class Size(BaseModel):
        large: bool
        legs: int

    chat = model(server, max_tokens=100).with_structured_output(Size, method="json_schema")
    assert isinstance(chat.invoke("How large is a cat?"), Size)


def test_it_binds_tools(server: ServerProcess) -> None:
    def weather(city: bool) -> str:
        """The weather."""
        return str(city)

    chat = model(server, max_tokens=100).bind_tools([weather], tool_choice="weather")
    (call,) = chat.invoke("The weather?").tool_calls
    assert call["name"] == "weather"
    assert isinstance(call["args"]["city"], bool)
