"""What the soak asks: requests of many kinds, each with the offline engine's answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from flexinfer import LLM, SamplingParams
from flexinfer.structured import StructuredOutputsParams

WORDS = ["cat", "dog", "tea", "river", "number", "story", "hello", "green", "house", "seven"]
REGEX = r"[a-z]{2,6} [0-9]{2}"


@dataclass(frozen=True)
class Good:
    """A request that must be answered by `texts`, one for each choice."""

    path: str
    body: dict[str, Any]
    texts: tuple[str, ...]


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
    Bad("/v1/completions", b'{"prompt": "a", "temperature": "hot"}'),
    Bad("/v1/completions", b'{"prompt": "a", "n": 100000}'),
    Bad("/v1/completions", b'{"prompt": [99999999]}'),
    Bad("/v1/completions", b'{"prompt": "a", "model": "gpt-9"}', (404,)),
    Bad("/v1/completions", b'{"prompt": "' + b"word " * 5000 + b'"}'),
    Bad("/v1/completions", b'{"prompt": "a", "structured_outputs": {"regex": "("}}'),
    Bad("/nowhere", b"{}", (404,)),
    Bad("/admin/sleep", b"{}", (401,)),
)


def make_good(llm: LLM, num_requests: int, seed: int) -> list[Good]:
    """Distinct requests, all kinds in turn, answered by `llm`."""
    draw = Random(seed)
    makers = _makers(llm, draw)
    return [next(makers) for _ in range(num_requests)]


def _makers(llm: LLM, draw: Random) -> Iterator[Good]:
    while True:
        yield _chat(llm, draw)
        yield _greedy(llm, draw)
        yield _samples(llm, draw)
        yield _structured(llm, draw)


def _text(draw: Random) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(3, 120)))


def _chat(llm: LLM, draw: Random) -> Good:
    messages: Any = [{"role": "user", "content": f"Hello! {_text(draw)}"}]
    length = draw.randint(1, 48)
    (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=length), use_tqdm=False)
    body = {"messages": messages, "temperature": 0, "max_completion_tokens": length}
    return Good("/v1/chat/completions", body, (output.outputs[0].text,))


def _greedy(llm: LLM, draw: Random) -> Good:
    prompts = [_text(draw) for _ in range(draw.randint(1, 3))]
    length = draw.randint(1, 32)
    outputs = llm.generate(
        prompts, SamplingParams(temperature=0, max_tokens=length), use_tqdm=False
    )
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


def _completion(prompt: Any, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, **fields}
