"""Log probabilities of prompts: those of the model's own logits, however the prompt is computed."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer import LLM, SamplingParams
from helpers.tiny_models import make_model, random_prompts

SETTINGS: dict[str, Any] = {"skip_tokenizer_init": True, "chunk_bytes": 4096, "dtype": "float32"}


def expected(prompt: list[int]) -> list[float]:
    """By one forward of the model, without any of our code."""
    model = make_model("llama")
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0, :-1].float()
    chosen = torch.log_softmax(logits, -1).gather(-1, torch.tensor(prompt[1:])[:, None])
    found: list[float] = chosen[:, 0].tolist()
    return found


def scores(output: Any) -> list[float]:
    first, *rest = output.prompt_logprobs
    assert first is None
    return [
        entry[token].logprob for entry, token in zip(rest, output.prompt_token_ids[1:], strict=True)
    ]


@pytest.mark.parametrize("budget", [7, 512])
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_they_are_those_of_the_model(budget: int, enable_prefix_caching: bool) -> None:
    """Also in chunks, and for a prompt that the prefix cache has."""
    prompts = random_prompts((20, 3, 1, 2, 33, 8))
    references = [expected(prompt) for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2)
    with LLM(
        make_model("llama"),
        **SETTINGS,
        max_num_seqs=4,
        kv_cache_memory_bytes=4 << 20,
        max_num_batched_tokens=budget,
        enable_prefix_caching=enable_prefix_caching,
    ) as llm:
        for _ in range(2):
            for output, reference in zip(
                llm.generate(prompts, params, use_tqdm=False), references, strict=True
            ):
                assert scores(output) == pytest.approx(reference, abs=1e-4)
                assert output.num_cached_tokens == 0
        plain = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    assert all(output.prompt_logprobs is None for output in plain)


def test_preemption_loses_none_of_them() -> None:
    prompts = random_prompts((60, 61, 62, 63))
    params = SamplingParams(temperature=0, max_tokens=60, prompt_logprobs=0)
    with LLM(
        make_model("llama"),
        **SETTINGS,
        max_num_seqs=4,
        kv_cache_memory_bytes=320 << 10,
        max_num_batched_tokens=16,
    ) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        preemptions = llm.engine.stats().preemptions
    assert sum(sum(reasons.values()) for reasons in preemptions.values()) > 0
    for output, prompt in zip(outputs, prompts, strict=True):
        assert scores(output) == pytest.approx(expected(prompt), abs=1e-4)


def test_samples_and_deltas_have_them_too() -> None:
    (prompt,) = random_prompts((9,))
    params = SamplingParams(n=3, max_tokens=4, prompt_logprobs=1)
    with LLM(make_model("llama"), **SETTINGS, kv_cache_memory_bytes=4 << 20) as llm:
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        first = next(iter(llm.stream([prompt], params)))
    assert scores(output) == pytest.approx(expected(prompt), abs=1e-4)
    assert scores(first) == pytest.approx(expected(prompt), abs=1e-4)
