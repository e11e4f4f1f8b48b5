"""What the soak asks: requests of many kinds, each with the offline engine's answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, islice
from random import Random
from typing import Any

from flexinfer import LLM, BeamSearchParams, SamplingParams
from flexinfer.sampling.grammars import StructuredOutputsParams

WORDS = ["cat", "dog", "tea", "river", "number", "story", "hello", "green", "house", "seven"]
REGEX = r"[a-z]{2,6} [0-9]{2}"
SYSTEM = "You answer shortly and remember what you are told about the house by the river. " * 6
"""Shared by many chats: its chunks are aliased."""


@dataclass(frozen=True)
class Good:
    """A request that must be answered by `texts`, one for each choice."""

    path: str
    body: dict[str, Any]
    texts: tuple[str, ...]
    can_stream: bool = True


@dataclass(frozen=True)
class Dialogue:
    """A conversation resource: what the user says and the answers, turn by turn."""

    system: str
    turns: tuple[str, ...]
    answers: tuple[str, ...]
    max_tokens: int


@dataclass(frozen=True)
class Bad:
    """A request that must be refused with one of these."""

    path: str
    content: bytes
    statuses: tuple[int, ...] = (400,)


BAD = (
    Bad("/v1/chat/completions", b"{no JSON"),
    Bad("/v1/chat/completions", b'{"messages": []}'),
    Bad("/v1/chat/completions", b'{"messages": [{"role": "king", "content": "x"}]}'),
    Bad("/v1/chat/completions", b'{"messages": "hello", "conversation": "none"}'),
    Bad("/v1/completions", b'{"prompt": "a", "temperature": "hot"}'),
    Bad("/v1/completions", b'{"prompt": "a", "n": 100000}'),
    Bad("/v1/completions", b'{"prompt": [99999999]}'),
    Bad("/v1/completions", b'{"prompt": "a", "model": "gpt-9"}', (404,)),
    Bad("/v1/completions", b'{"prompt": "' + b"word " * 5000 + b'"}'),
    Bad("/v1/completions", b'{"prompt": "a", "structured_outputs": {"regex": "("}}'),
    Bad("/v1/conversations", b'{"ttl": -1}'),
    Bad("/nowhere", b"{}", (404,)),
    Bad("/admin/sleep", b"{}", (401,)),
)


def make_good(llm: LLM, num_requests: int, seed: int) -> list[Good]:
    """Distinct requests, all kinds in turn, answered by `llm`."""
    draw = Random(seed)
    makers: list[Callable[[LLM, Random], Good]]
    makers = [_chat, _greedy, _samples, _structured, _tokens, _beams]
    return [make(llm, draw) for make in islice(cycle(makers), num_requests)]


def make_dialogues(llm: LLM, num_dialogues: int, seed: int) -> list[Dialogue]:
    draw = Random(seed)
    return [_dialogue(llm, draw) for _ in range(num_dialogues)]


def _text(draw: Random, most: int = 120) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(3, most)))


def _answer(llm: LLM, messages: Any, max_tokens: int) -> str:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    (output,) = llm.chat(messages, params, use_tqdm=False)
    return output.outputs[0].text


def _chat(llm: LLM, draw: Random) -> Good:
    messages: Any = [{"role": "user", "content": f"Hello! {_text(draw)}"}]
    if draw.random() < 0.5:
        messages.insert(0, {"role": "system", "content": SYSTEM})
    length = draw.randint(1, 48)
    body = {"messages": messages, "temperature": 0, "max_completion_tokens": length}
    return Good("/v1/chat/completions", body, (_answer(llm, messages, length),))


def _greedy(llm: LLM, draw: Random) -> Good:
    prompts = [_text(draw) for _ in range(draw.randint(1, 3))]
    length = draw.randint(1, 32)
    params = SamplingParams(temperature=0, max_tokens=length)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    texts = tuple(output.outputs[0].text for output in outputs)
    return Good("/v1/completions", _completion(prompts, temperature=0, max_tokens=length), texts)


def _samples(llm: LLM, draw: Random) -> Good:
    prompt, n = _text(draw), draw.randint(2, 4)
    fields = {"n": n, "seed": draw.randint(0, 1 << 30), "top_k": 5, "max_tokens": 16}
    (output,) = llm.generate(prompt, SamplingParams(**fields), use_tqdm=False)  # type: ignore[arg-type]
    texts = tuple(one.text for one in output.outputs)
    return Good("/v1/completions", _completion(prompt, **fields), texts)


def _structured(llm: LLM, draw: Random) -> Good:
    prompt = _text(draw)
    structure = StructuredOutputsParams(regex=REGEX)
    params = SamplingParams(temperature=0, max_tokens=40, structured_outputs=structure)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    body = _completion(prompt, temperature=0, max_tokens=40, structured_outputs={"regex": REGEX})
    return Good("/v1/completions", body, (output.outputs[0].text,))


def _tokens(llm: LLM, draw: Random) -> Good:
    """Token ids, a long answer, a stop string, a salt."""
    token_ids = llm.get_tokenizer()(_text(draw)).input_ids
    fields = {"temperature": 0, "max_tokens": draw.randint(64, 200), "ignore_eos": True}
    params = SamplingParams(stop=[" seven"], **fields)  # type: ignore[arg-type]
    (output,) = llm.generate([token_ids], params, use_tqdm=False)
    salt = draw.choice((None, "red", "blue"))
    body = _completion(token_ids, stop=" seven", cache_salt=salt, **fields)
    return Good("/v1/completions", body, (output.outputs[0].text,))


def _beams(llm: LLM, draw: Random) -> Good:
    prompt, width, length = _text(draw), draw.randint(2, 4), draw.randint(4, 24)
    params = BeamSearchParams(beam_width=width, max_tokens=length)
    (output,) = llm.beam_search(prompt, params, use_tqdm=False)
    body = _completion(prompt, use_beam_search=True, n=width, temperature=0, max_tokens=length)
    tokenizer = llm.get_tokenizer()
    num_prompt = len(tokenizer(prompt).input_ids)
    texts = tuple(
        tokenizer.decode(beam.tokens[num_prompt:], skip_special_tokens=True)
        for beam in output.sequences
    )
    return Good("/v1/completions", body, texts, can_stream=False)


def _dialogue(llm: LLM, draw: Random) -> Dialogue:
    turns, answers = tuple(_text(draw, 30) for _ in range(3)), []
    length = draw.randint(4, 24)
    messages: Any = [{"role": "system", "content": SYSTEM}]
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        answers.append(_answer(llm, messages, length))
        messages.append({"role": "assistant", "content": answers[-1]})
    return Dialogue(SYSTEM, turns, tuple(answers), length)


def _completion(prompt: Any, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, **fields}
