"""What a request may ask for gives on each device what it gives on the CPU, in float32."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from flexinfer import LLM, LoRARequest, SamplingParams, UnsupportedModelError
from flexinfer.cli.settings import SHIPPED_MODEL
from flexinfer.sampling.grammars import StructuredOutputsParams
from flexinfer.sampling.params import BeamSearchParams
from helpers.lora_kit import merged_reference, save_adapter
from helpers.tiny_models import VOCAB_SIZE, make_model, random_prompts, reference

PROMPTS = random_prompts((20, 33, 7, 41))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny Llama, as a user has it on disk."""
    path = tmp_path_factory.mktemp("llama")
    make_model("llama").save_pretrained(path)
    return str(path)


@contextmanager
def open_llm(model: str, device: str, **settings: Any) -> Iterator[LLM]:
    torch.backends.cuda.matmul.allow_tf32 = False
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 256 << 20,
        "skip_tokenizer_init": model != str(SHIPPED_MODEL),
    }
    with LLM(model, device=device, **{**defaults, **settings}) as llm:
        yield llm
        llm.llm_engine.manager.check_integrity()


def tokens(outputs: list[Any]) -> list[list[list[int]]]:
    return [[list(sample.token_ids) for sample in output.outputs] for output in outputs]


def random_params(rng: random.Random, seed: int) -> SamplingParams:
    """Of all that changes what is drawn, each in one of two requests."""
    choices: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.7, 1.3]),
        "top_k": rng.choice([1, 5, 40]),
        "top_p": rng.choice([0.3, 0.9]),
        "min_p": rng.choice([0.02, 0.2]),
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
        "logit_bias": {rng.randrange(VOCAB_SIZE): 3.0},
        "allowed_token_ids": list(range(0, VOCAB_SIZE, 3)),
        "logprobs": 3,
        "prompt_logprobs": 2,
        "min_tokens": 4,
        "stop_token_ids": [5, 6, 7],
        "n": 3,
    }
    chosen = {name: value for name, value in choices.items() if rng.random() < 0.5}
    return SamplingParams(seed=seed, max_tokens=12, ignore_eos=True, **chosen)


def test_sampling_draws_what_the_cpu_draws(folder: str, device: str) -> None:
    rng = random.Random(0)
    params = [random_params(rng, seed) for seed in range(48)]
    prompts = [rng.choice(PROMPTS) for _ in params]
    found = {}
    for place in dict.fromkeys(("cpu", device)):
        with open_llm(folder, place) as llm:
            found[place] = llm.generate(prompts, params, use_tqdm=False)
    assert tokens(found[device]) == tokens(found["cpu"])
    for ours, theirs in zip(found[device], found["cpu"], strict=True):
        for sample, other in zip(ours.outputs, theirs.outputs, strict=True):
            for mine, its in zip(sample.logprobs or (), other.logprobs or (), strict=True):
                assert mine.keys() == its.keys()
                for token in mine:
                    assert mine[token].logprob == pytest.approx(its[token].logprob, abs=1e-3)


def test_ngram_speculation_changes_no_token(folder: str, device: str) -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2}
    prompts = [prompt * 3 for prompt in PROMPTS]
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    sampled = SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True)
    answers = []
    for speculative_config in (None, ngram):
        with open_llm(folder, device, speculative_config=speculative_config) as llm:
            answers.append(
                [tokens(llm.generate(prompts, p, use_tqdm=False)) for p in (greedy, sampled)]
            )
    assert answers[0] == answers[1]


def test_adapters_in_one_batch(folder: str, device: str, tmp_path: Path) -> None:
    paths = [None, *(save_adapter(tmp_path / str(i), seed=i) for i in (1, 2))]
    requests = [p and LoRARequest(p.name, int(p.name), str(p)) for p in paths]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with open_llm(folder, device, enable_lora=True, max_loras=2) as llm:
        outputs = llm.generate([PROMPTS[0]] * 3, params, lora_request=requests, use_tqdm=False)
    expected = [merged_reference("llama", path, PROMPTS[0], 8) for path in paths]
    assert [sample for (sample,) in tokens(outputs)] == expected


def test_beams(folder: str, device: str) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    found = []
    for place in dict.fromkeys(("cpu", device)):
        with open_llm(folder, place) as llm:
            outputs = llm.beam_search([{"prompt_token_ids": PROMPTS[0]}], params)
            found.append([list(beam.tokens) for beam in outputs[0].sequences])
    assert found[0] == found[-1]


def test_structured_output_of_the_shipped_model(device: str) -> None:
    structure = StructuredOutputsParams(regex="[0-9]{3}-[a-f]{2}")
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=24, structured_outputs=structure)
    with open_llm(str(SHIPPED_MODEL), device) as llm:
        texts = [out.outputs[0].text for out in llm.generate(["Say"] * 4, params, use_tqdm=False)]
    assert all(re.fullmatch("[0-9]{3}-[a-f]{2}", text) for text in texts), texts


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_requests_say_the_same(folder: str, device: str, mode: str) -> None:
    prompts = random_prompts((60, 50, 40, 70, 30, 66))
    budget, chunk = {"cpu": (512 << 10, 16 << 10), "cuda": (4 << 20, 2 << 20)}[device]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with open_llm(
        folder,
        device,
        kv_cache_memory_bytes=budget,
        chunk_bytes=chunk,
        max_model_len=128,
        preemption_mode=mode,
        swap_space=64 << 20,
    ) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    expected = [[reference("llama", tuple(prompt), 40)] for prompt in prompts]
    assert tokens(outputs) == expected


def test_a_sleeping_engine_wakes_up_the_same(folder: str, device: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with open_llm(folder, device) as llm:
        before = tokens(llm.generate(PROMPTS, params, use_tqdm=False))
        for level in (1, 2):
            llm.sleep(level=level)
            llm.wake_up()
            assert tokens(llm.generate(PROMPTS, params, use_tqdm=False)) == before


@pytest.mark.parametrize("settings", [{"quantization": "int8"}, {"kv_cache_dtype": "int8"}])
def test_what_only_a_cpu_can_is_refused(folder: str, device: str, settings: dict[str, Any]) -> None:
    if device == "cpu":
        with open_llm(folder, device, **settings):
            return
    with pytest.raises((ValueError, UnsupportedModelError), match="CPU"):
        open_llm(folder, device, **settings).__enter__()
