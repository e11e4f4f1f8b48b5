"""Heavy clients at a real server: litellm, instructor, OpenAI's agents."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict

from flexinfer import LLM, SamplingParams
from flexinfer.async_llm import AsyncLLM
from helpers.scripted import check_admitted, say
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


OPENAI_MODES = [
    *("FUNCTIONS", "TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"),
    *("RESPONSES_TOOLS", "RESPONSES_TOOLS_WITH_INBUILT_TOOLS"),
]


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
    size = instructor_at(server.url, "ANTHROPIC_TOOLS").chat.completions.create(
        model=MODEL, messages=CHAT, response_model=Size, max_tokens=200, max_retries=0
    )
    assert isinstance(size, Size)


SIZE = '{"large": true, "legs": 4}'
CALLS = f"""<tool_call>{{"name": "Size", "arguments": {SIZE}}}</tool_call>
<tool_call>{{"name": "Size", "arguments": {SIZE}}}</tool_call>"""


def instructor_at(url: str, mode: str) -> Any:
    """instructor with the client that a mode is for."""
    instructor = pytest.importorskip("instructor")
    if not mode.startswith("ANTHROPIC"):
        plain = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        return instructor.from_openai(plain, mode=getattr(instructor.Mode, mode))
    anthropic = pytest.importorskip("anthropic")
    claude = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    return instructor.from_anthropic(claude, mode=getattr(instructor.Mode, mode))


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("JSON", SIZE),
        ("JSON_O1", SIZE),
        ("MD_JSON", f"Here it is:\n```json\n{SIZE}\n```\n"),
        ("ANTHROPIC_JSON", SIZE),
        ("ANTHROPIC_TOOLS", SIZE),
        ("PARALLEL_TOOLS", CALLS),
        ("ANTHROPIC_PARALLEL_TOOLS", CALLS),
    ],
)
def test_instructor_gets_what_the_model_chose(
    mode: str, text: str, scripted: str, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modes that leave to the model what ours, a tiny one, cannot do."""
    made, is_parallel = instructor_at(scripted, mode), "PARALLEL" in mode
    asked = say(monkeypatch, llm, text)
    sizes = made.chat.completions.create(
        model=MODEL,
        messages=CHAT,
        response_model=Iterable[Size] if is_parallel else Size,
        max_tokens=200,
        max_retries=0,
    )
    found = list(sizes) if is_parallel else [sizes]
    assert [one.model_dump_json() for one in found] == [SIZE.replace(" ", "")] * len(found)
    assert len(found) == (2 if is_parallel else 1)
    check_admitted(llm, text, asked)


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
