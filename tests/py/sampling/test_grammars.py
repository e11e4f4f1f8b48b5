"""Grammars are compiled beside the engine, within limits, and for their own callers alone."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("llguidance")

from flexinfer import LLM, AsyncLLM, EngineDeadError, RequestError, SamplingParams, async_llm
from flexinfer.cli.settings import SHIPPED_MODEL
from flexinfer.errors import EngineError
from flexinfer.sampling import grammars
from flexinfer.sampling.grammars import GrammarCompiler, StructuredOutputsParams, TokenMatcher

PLAIN = SamplingParams(temperature=0, max_tokens=4)


def asking(**structure: Any) -> SamplingParams:
    params = StructuredOutputsParams(**structure)
    return SamplingParams(structured_outputs=params, max_tokens=40, seed=1)


async def last(outputs: Any) -> Any:
    final = None
    async for output in outputs:
        final = output
    return final


def with_llm(scenario: Callable[[AsyncLLM], Awaitable[None]]) -> None:
    async def main() -> None:
        async with AsyncLLM(str(SHIPPED_MODEL), kv_cache_memory_bytes="16MiB") as llm:
            await scenario(llm)

    asyncio.run(asyncio.wait_for(main(), 120))


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is compiled before the event is set."""
    gate = threading.Event()
    real = GrammarCompiler._compile

    def compile_late(self: GrammarCompiler, params: StructuredOutputsParams) -> Any:
        assert threading.current_thread().name.startswith("flexinfer-grammar")
        assert gate.wait(60)
        return real(self, params)

    monkeypatch.setattr(GrammarCompiler, "_compile", compile_late)
    return gate


def test_a_grammar_that_is_being_compiled_holds_up_no_other_request(slow: threading.Event) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        waiting = [
            asyncio.create_task(last(llm.generate("A", asking(choice=[f"yes{i}", "no"]))))
            for i in range(4)
        ]
        await asyncio.sleep(0.05)
        for _ in range(3):
            assert len((await last(llm.generate("B", PLAIN))).outputs[0].token_ids) == 4
        assert not any(task.done() for task in waiting)
        assert await llm.call(lambda engine: engine.get_num_unfinished_requests()) == 0
        slow.set()
        for i, output in enumerate(await asyncio.gather(*waiting)):
            assert output.outputs[0].text in (f"yes{i}", "no")

    with_llm(scenario)


def test_a_caller_that_leaves_takes_its_grammar_back(slow: threading.Event) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        tasks = [
            asyncio.create_task(last(llm.generate("A", asking(choice=[f"yes{i}"]))))
            for i in range(8)
        ]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        slow.set()
        assert len((await last(llm.generate("B", PLAIN))).outputs[0].token_ids) == 4
        for _ in range(100):  # the threads end what they had begun, and begin nothing more
            await asyncio.sleep(0.01)
        assert len(llm.grammars._recent) <= grammars.NUM_THREADS
        assert await llm.call(lambda engine: engine.get_num_unfinished_requests()) == 0

    with_llm(scenario)


def test_time_has_a_limit(slow: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_llm, "COMPILE_TIMEOUT_S", 0.05)

    async def scenario(llm: AsyncLLM) -> None:
        with pytest.raises(RequestError, match=r"choice was not compiled within 0\.05 s"):
            await last(llm.generate("A", asking(choice=["yes"])))
        slow.set()

    with_llm(scenario)


def test_a_grammar_in_use_is_compiled_once_however_many_others_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammars, "MAX_CACHED_GRAMMARS", 1)
    compiled: list[str] = []
    real = GrammarCompiler._compile

    def count(self: GrammarCompiler, params: StructuredOutputsParams) -> Any:
        compiled.append(params.source)
        return real(self, params)

    monkeypatch.setattr(GrammarCompiler, "_compile", count)

    async def scenario(llm: AsyncLLM) -> None:
        choices = [[f"yes{i}", "no"] for i in range(6)]
        requests = [last(llm.generate("A", asking(choice=choice))) for choice in choices]
        outputs = await asyncio.gather(*requests)
        assert all(o.outputs[0].text in c for o, c in zip(outputs, choices, strict=True))
        assert sorted(compiled) == sorted(json.dumps(choice) for choice in choices)

    with_llm(scenario)


def test_a_closed_engine_says_so() -> None:
    async def scenario(llm: AsyncLLM) -> None:
        assert (await last(llm.generate("A", asking(choice=["yes"])))).outputs[0].text == "yes"
        llm.shutdown()
        with pytest.raises(EngineDeadError):
            await last(llm.generate("A", asking(choice=["no"])))

    with_llm(scenario)


@pytest.fixture(scope="module")
def offline() -> Any:
    with LLM(str(SHIPPED_MODEL), kv_cache_memory_bytes="16MiB") as llm:
        yield llm


def test_size_has_a_limit(offline: LLM) -> None:
    choice = [f"option number {i}" for i in range(60000)]
    with pytest.raises(RequestError, match=r"choice has 1[0-9]* bytes, but .* at most 524288"):
        offline.generate("A", asking(choice=choice), use_tqdm=False)


@pytest.mark.parametrize("num_tokens", [0, 2])
def test_a_grammar_that_fails_among_twenty_rows_ends_alone(
    offline: LLM, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rows of the step are drawn again: no grammar reads a token twice."""
    kinds = [
        asking(choice=["red", "green", "blue"]),
        asking(regex="[a-f]{8,16}"),
        asking(json={"type": "object", "properties": {"a": {"type": "integer"}}}),
        SamplingParams(seed=3, max_tokens=8),
    ]
    prompts = [chr(ord("A") + i) for i in range(21)]
    params = [kinds[i % len(kinds)] for i in range(20)]
    plain = offline.generate(prompts[:20], params, use_tqdm=False)
    real = TokenMatcher.allowed

    def fail(self: TokenMatcher, token_ids: Sequence[int], num_drafted: int = 0) -> Any:
        mask = real(self, token_ids, num_drafted)
        if self in doomed and len(token_ids) >= num_tokens:
            raise EngineError("the grammar is at a loss")
        return mask

    doomed: list[TokenMatcher] = []
    make = GrammarCompiler.matcher

    def note(self: GrammarCompiler, structure: StructuredOutputsParams) -> TokenMatcher:
        matcher = make(self, structure)
        if structure.source == "[x-z]{5}":
            doomed.append(matcher)
        return matcher

    monkeypatch.setattr(GrammarCompiler, "matcher", note)
    monkeypatch.setattr(TokenMatcher, "allowed", fail)
    outputs = offline.generate(prompts, [*params, asking(regex="[x-z]{5}")], use_tqdm=False)
    bad = outputs.pop().outputs[0]
    assert (bad.finish_reason, len(bad.token_ids)) == ("error", num_tokens)
    assert bad.stop_reason == "the grammar is at a loss"
    assert [o.outputs for o in outputs] == [o.outputs for o in plain]


def test_a_proposed_token_cannot_harm_the_matcher_of_its_request(offline: LLM) -> None:
    """Behind a brace nothing can be told: there are too many properties."""
    big = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(700)}}
    schema = {"anyOf": [{"enum": [12, 34]}, {**big, "additionalProperties": False}]}
    params = StructuredOutputsParams(json=schema, whitespace_pattern="")
    engine = offline.llm_engine
    brace, *one_two = engine.tokenizer.convert_tokens_to_ids(list("{12"))
    matcher, other = engine.grammars.matcher(params), engine.grammars.matcher(params)
    assert not matcher.allowed([brace], num_drafted=1).any()
    assert not matcher.allowed([brace, brace], num_drafted=2).any()
    assert not matcher.allowed(one_two[1:], num_drafted=1).any()
    assert (matcher.allowed([]) == other.allowed([])).all()
    assert (matcher.allowed(one_two, num_drafted=1) == other.allowed(one_two)).all()
    with pytest.raises(EngineError, match="the grammar is too complex"):
        engine.grammars.matcher(params).allowed([brace])


@pytest.mark.parametrize(
    ("structure", "reason"),
    [
        ({"choice": [f"option number {i}" for i in range(2100)]}, "stop"),
        (
            {
                "json": {
                    "type": "object",
                    "properties": {f"p{i}": {"type": "string"} for i in range(600)},
                    "additionalProperties": False,
                }
            },
            "error",
        ),
        ({"regex": "(((([a-z]{1,30}){1,30}){1,30}){1,30})"}, "error"),
        ({"choice": ["", "a"]}, "stop"),
        ({"choice": ["ab", "abc", 'd"e', "f\ng"]}, "stop"),
    ],
)
def test_large_structures_are_kept_or_end_alone(
    offline: LLM, structure: dict[str, Any], reason: str
) -> None:
    prompts = ["A", "B", "C"]
    plain = offline.generate(prompts, PLAIN, use_tqdm=False)
    outputs = offline.generate(
        [*prompts, "D"], [PLAIN, PLAIN, PLAIN, asking(**structure)], use_tqdm=False
    )
    end = outputs.pop().outputs[0]
    assert [o.outputs for o in outputs] == [o.outputs for o in plain]
    assert end.finish_reason == reason
    if reason == "stop":
        assert end.text in structure["choice"]
    else:
        assert "the grammar is too complex" in str(end.stop_reason)
