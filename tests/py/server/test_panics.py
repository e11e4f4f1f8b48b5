"""What a library in Rust raises when it panics is answered as other unexpected errors are, and
harms no request but the one that led to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from flexinfer import async_llm
from flexinfer.engine.inputs import InputProcessor
from flexinfer.engine.output_builder import OutputBuilder
from flexinfer.runner.model_runner import ModelRunner
from flexinfer.runner.plan import StepPlan
from flexinfer.sampling.grammars import GrammarCompiler
from flexinfer.sampling.sampler import Sampler
from flexinfer.server.http.errors import PanicMiddleware, install_error_handlers

BAD_SEED = 666
BAD_PROMPT = "panic" * 20


class PanicException(BaseException):
    """As pyo3 makes one for each library."""


def test_a_panic_has_the_shape_of_other_errors() -> None:
    app = FastAPI()
    install_error_handlers(app)

    @app.get("/")
    async def panic() -> None:
        raise PanicException("index out of bounds")

    answer = TestClient(app, raise_server_exceptions=False).get("/")
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"


@pytest.mark.parametrize(
    "kind", [asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit, ValueError]
)
def test_what_is_no_panic_goes_on_as_it_is(kind: type[BaseException]) -> None:
    error = kind()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise error

    call = PanicMiddleware(app)({}, None, None)  # type: ignore[arg-type]
    with pytest.raises(kind) as caught:
        call.send(None)
    assert caught.value is error


def panics_for(
    patch: pytest.MonkeyPatch, owner: Any, name: str, is_bad: Callable[..., bool]
) -> None:
    real = getattr(owner, name)

    def stage(*arguments: Any) -> Any:
        if is_bad(*arguments):
            raise PanicException("index out of bounds")
        return real(*arguments)

    patch.setattr(owner, name, stage)


def is_bad_row(state: Any) -> bool:
    return bool(state.params.seed == BAD_SEED and len(state.output_token_ids) == 3)


def is_bad_output(builder: OutputBuilder, *_: Any) -> bool:
    request = builder.request
    return request.params.seed == BAD_SEED and request.num_output_tokens == 3


def is_bad_step(runner: ModelRunner, _: Any, plan: StepPlan) -> bool:
    return any(is_bad_row(runner.sampler.sequences[i]) for i in plan.sampling_ids)


STAGES: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "prompt": (InputProcessor, "parse", lambda _, prompt: len(prompt["prompt_token_ids"]) > 20),
    "bad words": (async_llm, "with_bad_words_token_ids", lambda params, _: bool(params.bad_words)),
    "grammar": (GrammarCompiler, "_compile", lambda _, params: params.regex == BAD_PROMPT),
    "model": (ModelRunner, "sample", is_bad_step),
    "sampling": (Sampler, "_process", lambda _, logits, states: any(map(is_bad_row, states))),
    "text": (OutputBuilder, "update", is_bad_output),
    "output": (OutputBuilder, "build", is_bad_output),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_panic_ends_the_request_that_led_to_it_and_no_other(
    stage: str, scripted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    panics_for(monkeypatch, *STAGES[stage])
    innocent = {"prompt": "I like", "seed": 1, "max_tokens": 8, "ignore_eos": True, "stream": True}
    bad: dict[str, Any] = {**innocent, "prompt": BAD_PROMPT, "seed": BAD_SEED}
    bad["presence_penalty"] = 0.01  # has the logits processed
    if stage == "bad words":
        bad |= {"bad_words": ["x"], "prompt": [BAD_PROMPT, BAD_PROMPT]}
    if stage == "grammar":
        bad |= {"structured_outputs": {"regex": BAD_PROMPT}, "ignore_eos": False}

    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=scripted, timeout=60) as client:
            asked = [client.post("/v1/completions", json=one) for one in (innocent, bad, innocent)]
            return [*await asyncio.gather(*asked), await client.get("/health")]

    *answers, health = asyncio.run(ask())
    assert "error" in answers.pop(1).text
    assert all("[DONE]" in answer.text and "error" not in answer.text for answer in answers)
    assert health.status_code == 200
