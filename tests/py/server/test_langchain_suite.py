"""LangChain's own suite for chat models (`langchain-tests`), with ChatOpenAI at a real server."""

from __future__ import annotations

from typing import Any, ClassVar

import httpx
import pytest

pytest.importorskip("langchain_openai")
pytest.importorskip("pytest_asyncio")
suite = pytest.importorskip("langchain_tests.integration_tests")

from langchain_openai import ChatOpenAI

from helpers.serving import MODEL, ServerProcess

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.filterwarnings("ignore:.*is marked with '@pytest.mark.asyncio'"),
]
MODELS_CHOICE = {
    "test_tool_calling",
    "test_tool_calling_async",
    "test_tool_calling_with_no_arguments",
    "test_agent_loop",
    "test_json_mode",
    "test_unicode_tool_call_integration",
    "test_bind_runnables_as_tools",
    "test_structured_output_pydantic_2_v1",
}
"""They want the right argument, no field beside those that a schema names, or a tool without being
made to call it: ours is a tiny model."""


class Chat(suite.ChatModelIntegrationTests):  # type: ignore[misc]
    """What both interfaces have in common."""

    fields: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def _at_a_server(self, server: ServerProcess, request: pytest.FixtureRequest) -> None:
        name = getattr(request.node, "originalname", None)
        if name == "test_stream_time":
            pytest.skip("it plays back what was recorded, and times that")
        if name in MODELS_CHOICE:
            request.applymarker(pytest.mark.xfail(reason="the model's choice"))
        body = {"prompt": '"', "add_special_tokens": False}
        (quote,) = httpx.post(f"{server.url}/tokenize", json=body).json()["tokens"]
        type(self).fields = {
            "base_url": f"{server.url}/v1",
            "api_key": "none",
            "max_tokens": 400,
            "temperature": 0,
            "stream_usage": True,
            # So that texts in what is forced come to an end.
            "extra_body": {"logit_bias": {str(quote): 12}},
        }

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODEL, **self.fields}

    @property
    def supports_json_mode(self) -> bool:
        return True


class TestChatCompletions(Chat):
    pass


class TestResponses(Chat):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "use_responses_api": True}
