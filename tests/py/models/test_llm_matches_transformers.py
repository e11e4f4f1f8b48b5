"""Greedy output is token-identical to transformers' `generate`, in float32.

Models are handed over as they are, or loaded from a folder by the engine, which fuses their layers.
"""

from __future__ import annotations

import atexit
from functools import cache
from shutil import rmtree
from tempfile import mkdtemp

import pytest

pytest.importorskip("torch")

from flexinfer import LLM, SamplingParams
from helpers.engine_kit import preempt_at_step
from helpers.tiny_models import CONFIGS, make_model, random_prompts, reference

NUM_NEW = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW)


def mixed_prompts() -> list[list[int]]:
    """Lengths from 1 to several windows, and more rows than a decode step has; two share a long
    head, one is a copy."""
    prompts = random_prompts((1, 5, 17, 40, 3, 130, 9))
    return [*prompts, prompts[3][:33] + prompts[5][:10], list(prompts[3])]


def expected(name: str, prompts: list[list[int]]) -> list[list[int]]:
    return [reference(name, tuple(prompt), NUM_NEW) for prompt in prompts]


def generate(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    llm.llm_engine.manager.check_integrity()
    return [output.outputs[0].token_ids for output in outputs]


SOURCES = ("handed over", "from a folder")


@cache
def folder_of(name: str) -> str:
    folder = mkdtemp(prefix=f"flexinfer-{name}-")
    atexit.register(rmtree, folder)
    make_model(name).save_pretrained(folder)
    return folder


def make_llm(name: str, source: str = SOURCES[0], **settings: object) -> LLM:
    defaults = {"max_num_seqs": 8, "kv_cache_memory_bytes": 512 << 20}
    model = make_model(name) if source == SOURCES[0] else folder_of(name)
    return LLM(model, skip_tokenizer_init=True, **{**defaults, **settings})  # type: ignore[arg-type]


LAYOUTS = [
    (SOURCES[0], chunk_bytes, layers_per_plane)
    for chunk_bytes in (4 << 10, 64 << 10, 2 << 20)
    for layers_per_plane in (None, 1)
] + [(SOURCES[1], 4 << 10, 1), (SOURCES[1], 2 << 20, None)]


@pytest.mark.parametrize(("source", "chunk_bytes", "layers_per_plane"), LAYOUTS)
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_mixed_batches_match(
    name: str,
    enable_prefix_caching: bool,
    source: str,
    chunk_bytes: int,
    layers_per_plane: int | None,
) -> None:
    prompts = mixed_prompts()
    with make_llm(
        name,
        source,
        enable_prefix_caching=enable_prefix_caching,
        chunk_bytes=chunk_bytes,
        layers_per_plane=layers_per_plane,
    ) as llm:
        assert generate(llm, prompts) == expected(name, prompts)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("chunk_bytes", [4 << 10, 2 << 20])
@pytest.mark.parametrize("name", CONFIGS)
def test_later_turns_on_cached_prefixes_match(name: str, chunk_bytes: int, source: str) -> None:
    prompts = mixed_prompts()
    with make_llm(name, source, chunk_bytes=chunk_bytes) as llm:
        for turn in range(3):
            answers = generate(llm, prompts)
            assert answers == expected(name, prompts)
            news = random_prompts((4,) * len(prompts), seed=turn)
            prompts = [p + a + n for p, a, n in zip(prompts, answers, news, strict=True)]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("max_num_batched_tokens", [8, 13, 80])
@pytest.mark.parametrize("name", CONFIGS)
def test_chunked_prefill_matches(name: str, max_num_batched_tokens: int, source: str) -> None:
    prompts = mixed_prompts()
    with make_llm(name, source, max_num_batched_tokens=max_num_batched_tokens) as llm:
        assert generate(llm, prompts) == expected(name, prompts)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_whole_prompt_prefill_matches(name: str, source: str) -> None:
    prompts = mixed_prompts()
    with make_llm(name, source, enable_chunked_prefill=False) as llm:
        assert generate(llm, prompts) == expected(name, prompts)


BUDGET_TOKENS = {"gemma2": 54}


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_neox"])
def test_preemption_matches(name: str, source: str, mode: str) -> None:
    prompts = random_prompts((20, 30, 25, 10, 28))
    model = make_model(name)
    bytes_per_token = 2 * model.config.num_hidden_layers * 64 * 4
    with make_llm(
        name,
        source,
        kv_cache_memory_bytes=BUDGET_TOKENS.get(name, 80) * bytes_per_token,
        chunk_bytes=4096,
        max_model_len=60,
        preemption_mode=mode,
        swap_space=200 * bytes_per_token,
    ) as llm:
        if name == "mistral":  # its requests hold their windows from the start and never grow
            preempt_at_step(llm.llm_engine, 6)
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        llm.llm_engine.manager.check_integrity()
        assert sum(llm.llm_engine.stats().preemptions[mode].values()) > 0
    assert [o.outputs[0].token_ids for o in outputs] == expected(name, prompts)


def test_loaded_model_is_left_as_it_was() -> None:
    model = make_model("llama")
    before = model.config._attn_implementation
    with make_llm("llama") as llm:
        generate(llm, random_prompts((5,)))
    assert model.config._attn_implementation == before
