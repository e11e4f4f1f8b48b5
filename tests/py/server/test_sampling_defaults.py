"""What a request leaves out is as the model's generation_config.json and the operator have it, at
each endpoint that generates, whole and streamed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from flexinfer.async_llm import AsyncLLM
from flexinfer.sampling.params import BeamSearchParams, SamplingParams
from helpers.advised import advised_model
from helpers.scripted import say
from helpers.serving import ServerProcess, make_llm, serving, settings

ADVICE = {"temperature": 0.6, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.2}
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
PROMPT = {"prompt": "Hello"}
MESSAGE = {**CHAT, "max_tokens": 5}
ENDPOINTS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": PROMPT,
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": MESSAGE,
}
TEXT = "ten words are said here and then there are more"


@pytest.fixture(scope="module")
def advised(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    folder = tmp_path_factory.mktemp("advised") / "model"
    made = make_llm(model=str(advised_model(folder, **ADVICE, max_new_tokens=6)))
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def limited() -> Iterator[AsyncLLM]:
    made = make_llm(override_generation_config={"max_new_tokens": 4, "temperature": 0})
    yield made
    made.shutdown()


def post(llm: AsyncLLM, path: str, body: dict[str, Any]) -> httpx.Response:
    with serving(llm, settings()) as url:
        return httpx.post(f"{url}{path}", json={"model": "tiny_chat", **body}, timeout=60)


def asked(
    monkeypatch: pytest.MonkeyPatch, llm: AsyncLLM, path: str, body: dict[str, Any]
) -> SamplingParams:
    """The params that the engine gets."""
    seen = say(monkeypatch, llm, TEXT)
    answer = post(llm, path, body)
    assert answer.status_code == 200, answer.text
    (params,) = seen
    return params


def drawn(params: SamplingParams) -> dict[str, float]:
    return {name: getattr(params, name) for name in ADVICE}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ENDPOINTS)
def test_what_is_left_out_is_the_models(
    advised: AsyncLLM, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    params = asked(monkeypatch, advised, path, {**ENDPOINTS[path], "stream": stream})
    assert drawn(params) == ADVICE


@pytest.mark.parametrize("path", ENDPOINTS)
def test_null_is_left_out_and_what_is_said_goes_before(
    advised: AsyncLLM, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    said = {"temperature": None, "top_p": 1.0, "top_k": 0, "min_p": 0, "repetition_penalty": 1.0}
    params = asked(monkeypatch, advised, path, {**ENDPOINTS[path], **said})
    assert drawn(params) == {**said, "temperature": 0.6}
    params = asked(monkeypatch, advised, path, {**ENDPOINTS[path], "temperature": 0})
    assert drawn(params) == {**ADVICE, "temperature": 0}


@pytest.mark.parametrize("path", ENDPOINTS)
def test_without_advice_they_are_openais(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    params = asked(monkeypatch, llm, path, ENDPOINTS[path])
    assert drawn(params) == drawn(SamplingParams())


def test_the_models_length_is_that_of_chats_that_name_none(
    advised: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [
        asked(monkeypatch, advised, path, body).max_tokens
        for path, body in (
            ("/v1/chat/completions", CHAT),
            ("/v1/chat/completions", {**CHAT, "max_tokens": 8}),
            ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 9}),
            ("/v1/responses", {"input": "Hello"}),
            ("/v1/responses", {"input": "Hello", "max_output_tokens": 10}),
            ("/v1/completions", PROMPT),  # OpenAI's default of 16 is one that the request has
        )
    ]
    assert lengths == [6, 8, 9, 6, 10, 16]


def test_a_models_length_that_its_context_has_not_is_no_reason_to_refuse(tmp_path: Path) -> None:
    folder = advised_model(tmp_path / "model", temperature=0, max_new_tokens=1_000_000)
    made = make_llm(model=str(folder))
    try:
        body = {**CHAT, "ignore_eos": True}
        answer = post(made, "/v1/chat/completions", body).json()
        assert answer["usage"]["total_tokens"] == made.max_model_len
    finally:
        made.shutdown()


@pytest.mark.parametrize("path", ENDPOINTS)
def test_the_operators_length_bounds_all_answers(
    limited: AsyncLLM, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    name = "max_output_tokens" if "responses" in path else "max_tokens"
    long, short = ({**ENDPOINTS[path], name: length} for length in (100, 3))
    assert asked(monkeypatch, limited, path, long).max_tokens == 4
    assert asked(monkeypatch, limited, path, short).max_tokens == 3


def test_an_answer_that_is_cut_there_says_so(
    limited: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, limited, TEXT)
    chat = post(limited, "/v1/chat/completions", CHAT).json()
    assert chat["choices"][0]["finish_reason"] == "length"
    message = post(limited, "/v1/messages", {**MESSAGE, "max_tokens": 50}).json()
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("max_tokens", 4)


def test_a_response_tells_what_it_was_drawn_by(advised: AsyncLLM) -> None:
    response = post(advised, "/v1/responses", {"input": "Hello", "top_p": 0.5}).json()
    assert (response["temperature"], response["top_p"]) == (0.6, 0.5)


def test_beams_have_no_part_of_it_but_the_length(
    advised: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[BeamSearchParams] = []
    search = advised.beam_search

    async def watch(prompt: Any, params: BeamSearchParams, *rest: Any, **named: Any) -> Any:
        seen.append(params)
        return await search(prompt, params, *rest, **named)

    monkeypatch.setattr(advised, "beam_search", watch)
    body = {**CHAT, "use_beam_search": True, "n": 2}
    assert post(advised, "/v1/chat/completions", body).status_code == 200
    assert seen == [BeamSearchParams(beam_width=2, max_tokens=6)]


def test_a_conversation_samples_by_them(advised: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = say(monkeypatch, advised, TEXT)
    with serving(advised, settings()) as url:
        made = httpx.post(f"{url}/v1/conversations", json={}).json()
        body = {**CHAT, "conversation": made["id"]}
        assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 200
    assert drawn(seen[0]) == ADVICE


def test_a_call_without_params_has_them(advised: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = advised.get_default_sampling_params()
    assert params == SamplingParams(**ADVICE, max_tokens=6)  # type: ignore[arg-type]
    seen: list[Any] = []
    submit = advised._thread.submit

    def watch(request_id: str, prompt: Any, given: Any, *rest: Any) -> Any:
        seen.append(given)
        return submit(request_id, prompt, given, *rest)

    monkeypatch.setattr(advised._thread, "submit", watch)

    async def call() -> None:
        async for _ in advised.generate([5, 6, 7]):
            pass

    asyncio.run(call())
    assert seen == [params]


def test_a_real_server_says_which_it_takes_and_samples_by_them(tmp_path: Path) -> None:
    folder = advised_model(tmp_path / "model", temperature=0, top_k=20, max_new_tokens=9)
    override = ("--override-generation-config", '{"top_k": 3}')
    with ServerProcess(tmp_path / "log", str(folder), *override) as server:
        server.wait_until_ready()
        url = f"{server.url}/v1/chat/completions"
        left_out, again = (httpx.post(url, json=CHAT, timeout=60).json() for _ in range(2))
        said = httpx.post(url, json={**CHAT, "temperature": 0, "max_tokens": 9}, timeout=60).json()
    told = "default sampling parameters: temperature 0, top_k 3, max_tokens 9; from"
    assert told in server.log.read_text()
    assert left_out["choices"] == again["choices"] == said["choices"]
    assert left_out["usage"]["completion_tokens"] <= 9


def test_a_real_server_refuses_a_fault_before_it_serves(tmp_path: Path) -> None:
    folder = advised_model(tmp_path / "model", temperature=-1)
    with ServerProcess(tmp_path / "log", str(folder)) as server:
        assert server.wait() != 0
    log = server.log.read_text()
    assert "temperature must be at least 0" in log
    assert "--generation-config vllm" in log
    assert "Traceback" not in log
