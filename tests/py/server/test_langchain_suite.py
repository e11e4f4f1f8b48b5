"""LangChain's own suite for chat models (`langchain-tests`), with ChatOpenAI at a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, ClassVar

import httpx
import pytest

pytest.importorskip("langchain_openai")
pytest.importorskip("pytest_asyncio")
suite = pytest.importorskip("langchain_tests.integration_tests")

from langchain_openai import ChatOpenAI

from helpers.scripted import check_admitted, say
from helpers.serving import MODEL, ServerProcess

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.filterwarnings("ignore:.*is marked with '@pytest.mark.asyncio'"),
]
JOKE = '{"setup": "Why do cats purr?", "punchline": "They are happy."}'


def call(name: str, **arguments: Any) -> str:
    return json.dumps([{"name": name, "arguments": arguments}], ensure_ascii=False)


SAYS = {
    "test_tool_calling": call("magic_function", input=3),
    "test_tool_calling_async": call("magic_function", input=3),
    "test_tool_calling_with_no_arguments": call("magic_function_no_args"),
    "test_bind_runnables_as_tools": call("greeting_generator", answer_style="pirate"),
    "test_unicode_tool_call_integration": call(
        "unicode_customer", customer_name="你好啊集团 こんにちは株式会社", description="two"
    ),
    "test_agent_loop": f"<tool_call>{call('get_weather', location='Rome')[1:-1]}</tool_call>",
    "test_json_mode": JOKE,
    "test_structured_output_pydantic_2_v1": JOKE,
}
"""What a model that has understood says where ours, a tiny one, has not: they want the right
argument, no field beside those that a schema names, or a tool without being made to call it."""


@pytest.fixture(scope="module")
def quote(server: ServerProcess) -> int:
    """The token that ends a text in JSON."""
    body = {"prompt": '"', "add_special_tokens": False}
    (token,) = httpx.post(f"{server.url}/tokenize", json=body, timeout=60).json()["tokens"]
    return int(token)


@pytest.fixture(scope="session")
def record_mode() -> str:
    """test_stream_time plays back what it has recorded: here it records."""
    return "once"


@pytest.fixture(scope="module")
def vcr_cassette_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cassettes"))


class Chat(suite.ChatModelIntegrationTests):  # type: ignore[misc]
    """What both interfaces have in common."""

    fields: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def _at_a_server(
        self,
        server: ServerProcess,
        quote: int,
        request: pytest.FixtureRequest,
        monkeypatch: pytest.MonkeyPatch,
    ) -> Iterator[None]:
        text = SAYS.get(request.node.originalname)
        type(self).fields = {
            "base_url": f"{request.getfixturevalue('scripted') if text else server.url}/v1",
            "api_key": "none",
            "max_tokens": 400,
            "temperature": 0,
            "stream_usage": True,
            # So that texts in what is forced come to an end.
            "extra_body": {"logit_bias": {str(quote): 12}},
        }
        if text is None:
            yield
            return
        llm = request.getfixturevalue("llm")
        asked = say(monkeypatch, llm, text)
        yield
        check_admitted(llm, text, asked)

    @property
    def enable_vcr_tests(self) -> bool:
        return True

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODEL, **self.fields}

    @property
    def model_override_value(self) -> str:
        return MODEL

    @property
    def supports_json_mode(self) -> bool:
        return True


class TestChatCompletions(Chat):
    pass


class TestResponses(Chat):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "use_responses_api": True}
