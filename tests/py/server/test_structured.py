"""Structured outputs: whatever the model would say, the text is what was asked for."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import httpx
import openai
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from flexinfer import LLM, RequestError, SamplingParams
from flexinfer.async_llm import AsyncLLM
from flexinfer.errors import EngineError
from flexinfer.sampling.grammars import GrammarCompiler, StructuredOutputsParams
from flexinfer.server.http.bodies import Turnstile
from helpers.serving import MODEL

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "likes": {"enum": ["tea", "coffee"]},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
CHAT: Any = [{"role": "user", "content": "Tell me about Ada."}]


def ask(client: openai.OpenAI, **fields: Any) -> str:
    answer = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_completion_tokens=300, **fields
    )
    assert answer.choices[0].finish_reason == "stop"
    return answer.choices[0].message.content or ""


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_json_schema_is_kept(client: openai.OpenAI, temperature: float) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    person = json.loads(ask(client, response_format=form, temperature=temperature, seed=1))
    assert set(person) == {"name", "age", "likes"}
    assert 0 <= person["age"] <= 150
    assert person["likes"] in ("tea", "coffee")


def test_a_json_object_is_one(client: openai.OpenAI) -> None:
    text = ask(
        client,
        response_format={"type": "json_object"},
        temperature=0,
        logit_bias={"0": 0},
        extra_body={"structured_outputs": None},
    )
    assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("structure", "pattern"),
    [
        ({"regex": r"[A-C]{2}-[0-9]{3}"}, r"[A-C]{2}-[0-9]{3}"),
        ({"choice": ["yes", "no", 'may"be']}, r'yes|no|may"be'),
        ({"grammar": 'start: "a" start "b" | "c"'}, r"a*cb*"),
        ({"json": {"type": "integer", "maximum": 99}}, r"\s*-?\d+\s*"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_other_structures_are_kept(
    client: openai.OpenAI, structure: Any, pattern: str, temperature: float
) -> None:
    text = ask(
        client, temperature=temperature, seed=5, extra_body={"structured_outputs": structure}
    )
    assert re.fullmatch(pattern, text)


def test_each_of_n_streamed_samples_keeps_it(client: openai.OpenAI) -> None:
    r"""Not with \d: llguidance's Unicode, and so its digits, is newer than Python's."""
    texts = ["", "", "", ""]
    for chunk in client.completions.create(
        model=MODEL,
        prompt="A number:",
        n=4,
        temperature=2,
        seed=1,
        max_tokens=40,
        stream=True,
        extra_body={"structured_outputs": {"regex": r"([0-9]{2}-){3}x"}},
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert all(re.fullmatch(r"([0-9]{2}-){3}x", text) for text in texts)
    assert len(set(texts)) > 1


@pytest.mark.parametrize(
    "structure",
    [
        {"regex": "("},
        {"regex": "(?=a)b"},
        {"grammar": "no rule"},
        {"json": '{"type": 3}'},
        {"json": "{"},
        {"json": {"$ref": "#/nowhere"}},
        {"regex": "a", "choice": ["b"]},
        {},
        {"choice": []},
    ],
)
def test_a_bad_structure_is_refused(client: openai.OpenAI, structure: Any) -> None:
    with pytest.raises(openai.BadRequestError):
        ask(client, extra_body={"structured_outputs": structure})


def test_a_preempted_request_keeps_its_structure() -> None:
    """The matcher reads the tokens again, wherever the request has been meanwhile."""
    from flexinfer.cli.settings import SHIPPED_MODEL

    with LLM(
        str(SHIPPED_MODEL),
        chunk_bytes="32KiB",
        kv_cache_memory_bytes=640 << 10,  # whatever the seeds say, too little for all
        max_num_seqs=8,
        enable_prefix_caching=False,
    ) as llm:
        structure = StructuredOutputsParams(regex=r"([a-z]{3,5} ){40}end")
        params = [
            SamplingParams(max_tokens=None, temperature=1, seed=i, structured_outputs=structure)
            for i in range(6)
        ]
        outputs = llm.generate(["Once"] * 6, params, use_tqdm=False)
        preemptions = llm.engine.stats().preemptions
    assert sum(sum(reasons.values()) for reasons in preemptions.values()) > 0
    assert all(re.fullmatch(r"([a-z]{3,5} ){40}end", o.outputs[0].text) for o in outputs)


PATTERNS = st.from_regex(r"\A([a-d]|[a-d]{1,3}\?|\[a-c\]\+|\(ab\|cd\)\*){1,5}\Z")


@settings(max_examples=25)
@given(pattern=PATTERNS, seed=st.integers(0, 99))
def test_the_allowed_tokens_are_those_that_a_partial_match_allows(
    offline: LLM, pattern: str, seed: int
) -> None:
    """A random walk; at each step all tokens are tried one by one."""
    engine = offline.engine
    tokenizer, vocab_size = engine.tokenizer, engine.loaded.vocab_size
    assert tokenizer is not None
    texts = [tokenizer.decode([token]) for token in range(vocab_size)]
    plain = [token for token in range(6, vocab_size) if texts[token].isascii()]
    matcher = GrammarCompiler(tokenizer, vocab_size, frozenset({2})).matcher(
        StructuredOutputsParams(regex=pattern)
    )
    draw = random.Random(seed)
    tokens: list[int] = []
    for _ in range(8):
        text = tokenizer.decode(tokens)
        allowed = matcher.allowed(tokens)
        assert bool(allowed[2]) == bool(regex.fullmatch(pattern, text))
        expected = [t for t in plain if regex.fullmatch(pattern, text + texts[t], partial=True)]
        offered = [token for token in plain if allowed[token]]
        if offered != expected:
            # Only one text can follow: llguidance then offers the longest token of it alone.
            longest = max((texts[t] for t in expected), key=len)
            assert all(longest.startswith(texts[t]) for t in expected)
            assert [texts[t] for t in offered] == [longest]
        if not expected:
            break
        tokens.append(draw.choice(expected))


def test_what_can_not_end_is_refused(offline: LLM) -> None:
    structure = StructuredOutputsParams(regex="a+")
    with pytest.raises(ValueError, match="ignore_eos"):
        SamplingParams(structured_outputs=structure, ignore_eos=True)
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))
    with pytest.raises(RequestError, match="regex cannot be compiled"):
        offline.generate("a", bad, use_tqdm=False)


@pytest.mark.parametrize("structure", [{"json": {"$ref": "#"}}, {"grammar": "start: start"}])
def test_what_never_ends_is_refused_in_words(structure: Any, http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "structured_outputs": structure}
    error = http.post("/v1/chat/completions", json=body).json()["error"]
    assert "no text of finite length" in error["message"]


WORDS = {f"p{i}": {"type": "string", "pattern": "^[a-z]{1,40}$"} for i in range(600)}


@pytest.mark.parametrize(
    "structure",
    [
        {"regex": "(((((([a-z]{1,30}){1,30}){1,30}){1,30}){1,30}){1,30})"},
        {"json": {"type": "object", "properties": WORDS, "additionalProperties": False}},
    ],
    ids=["at once", "after a token"],
)
def test_a_grammar_that_turns_out_too_complex_is_the_callers_fault(
    structure: Any, http: httpx.Client
) -> None:
    body = {"prompt": "a", "max_tokens": 8, "structured_outputs": structure}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "structured_outputs"
    assert "too complex" in answer.json()["error"]["message"]


def test_a_token_that_a_structure_has_not_allowed_is_our_fault(offline: LLM) -> None:
    grammars = offline.engine.grammars
    matcher = grammars.matcher(StructuredOutputsParams(choice=["yes"]))
    wrong = offline.get_tokenizer()("no", add_special_tokens=False).input_ids
    with pytest.raises(EngineError, match="went wrong"):
        matcher.allowed(wrong)


def test_what_is_compiled_already_waits_for_no_turn(
    llm: AsyncLLM, scripted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[str] = []
    take = Turnstile.turn

    def turn(self: Turnstile, tenant: str) -> Any:
        turns.append(tenant)
        return take(self, tenant)

    monkeypatch.setattr(Turnstile, "turn", turn)
    for pattern in ("turn [0-9]", "turn [0-9]", "turn [a-z]"):
        body = {"prompt": "a", "max_tokens": 8, "structured_outputs": {"regex": pattern}}
        assert httpx.post(f"{scripted}/v1/completions", json=body, timeout=60).is_success
    assert len(turns) == 2
    tool = {"name": "turn", "parameters": {"type": "object", "properties": {"taken": {}}}}
    forced = {
        "messages": [{"role": "user", "content": "a"}],
        "tools": [{"type": "function", "function": tool}],
        "tool_choice": "required",
        "max_tokens": 4,
    }
    for _ in range(2):
        answer = httpx.post(f"{scripted}/v1/chat/completions", json=forced, timeout=60)
        assert answer.is_success
    assert len(turns) == 3
