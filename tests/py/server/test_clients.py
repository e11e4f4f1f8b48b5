"""Heavy clients at a real server: litellm, instructor, OpenAI's agents."""

from __future__ import annotations

import asyncio
import os
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict

from flexinfer import LLM, SamplingParams
from helpers.serving import MODEL, ServerProcess

pytestmark = pytest.mark.slow
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network
CHAT: Any = [{"role": "user", "content": "Hello"}]


class Size(BaseModel):
    """The size of an animal."""

    model_config = ConfigDict(extra="forbid")
    large: bool
    legs: Literal[2, 4]


TOOL: Any = {
    "type": "function",
    "function": {"name": "size", "parameters": Size.model_json_schema()},
}
CHOICE: Any = {"type": "function", "function": {"name": "size"}}


def expected(offline: LLM) -> str:
    params = SamplingParams(temperature=0, max_tokens=30)
    (output,) = offline.chat(CHAT, params, use_tqdm=False)
    return output.outputs[0].text


@pytest.fixture(params=["openai", "anthropic"])
def route(request: pytest.FixtureRequest, server: ServerProcess) -> dict[str, Any]:
    """litellm's way to either of the interfaces."""
    base = f"{server.url}/v1" if request.param == "openai" else server.url
    return {"model": f"{request.param}/{MODEL}", "api_base": base, "api_key": "none"}


def test_litellm_answers_and_streams(route: dict[str, Any], offline: LLM) -> None:
    litellm = pytest.importorskip("litellm")
    ask = {**route, "messages": CHAT, "temperature": 0, "max_tokens": 30}
    answer = litellm.completion(**ask)
    assert answer.choices[0].message.content == expected(offline)
    chunks = list(litellm.completion(**ask, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == expected(offline)


@pytest.mark.parametrize("stream", [False, True])
def test_litellm_forces_tools(route: dict[str, Any], stream: bool) -> None:
    litellm = pytest.importorskip("litellm")
    ask = {**route, "messages": CHAT, "tools": [TOOL], "tool_choice": CHOICE, "max_tokens": 200}
    answer = litellm.completion(**ask, stream=stream)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer), messages=CHAT)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "size"
    assert isinstance(Size.model_validate_json(call.function.arguments), Size)


def test_litellm_knows_a_full_context(route: dict[str, Any]) -> None:
    litellm = pytest.importorskip("litellm")
    for words in (2100, 500_000):
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.completion(**route, messages=[{"role": "user", "content": "a " * words}])


OPENAI_MODES = ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"]


@pytest.mark.parametrize("mode", OPENAI_MODES)
def test_instructor_gets_objects(client: openai.OpenAI, mode: str) -> None:
    instructor = pytest.importorskip("instructor")
    made = instructor.from_openai(client, mode=getattr(instructor.Mode, mode))
    limit = {"max_output_tokens" if mode.startswith("RESPONSES") else "max_tokens": 200}
    size = made.chat.completions.create(
        model=MODEL, messages=CHAT, response_model=Size, max_retries=0, **limit
    )
    assert isinstance(size, Size)


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_instructor_streams_objects_in_parts(client: openai.OpenAI, mode: str) -> None:
    instructor = pytest.importorskip("instructor")
    made = instructor.from_openai(client, mode=getattr(instructor.Mode, mode))
    parts = list(
        made.chat.completions.create_partial(
            model=MODEL, messages=CHAT, response_model=Size, max_tokens=200, max_retries=0
        )
    )
    assert len(parts) > 1
    assert parts[-1].legs in (2, 4)


def test_instructor_uses_anthropics_tools(server: ServerProcess) -> None:
    anthropic = pytest.importorskip("anthropic")
    instructor = pytest.importorskip("instructor")
    plain = anthropic.Anthropic(base_url=server.url, api_key="none")
    made = instructor.from_anthropic(plain, mode=instructor.Mode.ANTHROPIC_TOOLS)
    size = made.chat.completions.create(
        model=MODEL, messages=CHAT, response_model=Size, max_tokens=200, max_retries=0
    )
    assert isinstance(size, Size)


@pytest.mark.parametrize("kind", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
@pytest.mark.parametrize("choice", ["required", "weather"])
@pytest.mark.parametrize("stream", [False, True])
def test_agents_run_forced_tools(
    server: ServerProcess, kind: str, choice: str, stream: bool
) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    asked: list[str] = []

    @agents.function_tool  # type: ignore[untyped-decorator]
    def weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather in a city."""
        asked.append(city)
        return f"sunny in {city}"

    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    agent = agents.Agent(
        name="a",
        instructions="Be kind.",
        tools=[weather],
        model=getattr(agents, kind)(model=MODEL, openai_client=client),
        model_settings=agents.ModelSettings(
            tool_choice=choice, max_tokens=200, parallel_tool_calls=False
        ),
        tool_use_behavior="stop_on_first_tool",
    )

    async def run() -> Any:
        async with client:
            if not stream:
                return await agents.Runner.run(agent, "Hello")
            result = agents.Runner.run_streamed(agent, "Hello")
            async for _ in result.stream_events():
                pass
            return result

    answer = asyncio.run(run())
    assert answer.final_output == f"sunny in {asked[0]}"
