"""The engine on each device says what transformers says there, whatever the memory does."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch

from flexinfer import LLM, SamplingParams
from flexinfer.config import EngineConfig
from helpers.tiny_models import CONFIGS, VOCAB_SIZE, make_model, random_prompts

NUM_NEW = 16
ARCHITECTURES = ("llama", "qwen3", "mistral", "gemma2", "gpt_oss")
NUM_REQUESTS = {"cpu": 100, "cuda": 1_000}
BF16_LOGIT_GAP = 0.03
"""bfloat16 keeps 8 bits. A token may differ from transformers' choice only where transformers' own
logit of it is within this fraction of the logits' range from the best one: a tie, at 8 bits."""

requires_graphs = pytest.mark.skipif(
    "enforce_eager" not in {field.name for field in dataclasses.fields(EngineConfig)},
    reason="this version of flexinfer has no CUDA graphs (EngineConfig.enforce_eager)",
)


@cache
def model_on(name: str, device: str, dtype: torch.dtype) -> Any:
    """A copy of the tiny model on `device`; the one of tiny_models stays where it is."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    model = type(make_model(name))(CONFIGS[name]())
    model.load_state_dict(make_model(name).state_dict())
    return model.to(device=device, dtype=dtype).eval()


def reference(model: Any, prompt: list[int], num_new: int) -> list[int]:
    """Greedy continuation of one prompt alone, by transformers on the same device."""
    ids = torch.tensor([prompt], device=model.device)
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_new
    )
    continuation: list[int] = output[0, len(prompt) :].tolist()
    return continuation


@contextmanager
def open_llm(model: Any, device: str, **settings: Any) -> Iterator[LLM]:
    defaults = {"max_num_seqs": 8, "kv_cache_memory_bytes": 512 << 20}
    with LLM(model, skip_tokenizer_init=True, device=device, **{**defaults, **settings}) as llm:
        yield llm
        llm.llm_engine.manager.check_integrity()


def generate(llm: LLM, prompts: list[list[int]], num_new: int = NUM_NEW) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=num_new)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def mixed_prompts() -> list[list[int]]:
    """Different lengths; two share a long head, one is a copy."""
    prompts = random_prompts((1, 5, 17, 40, 3, 70, 9))
    return [*prompts, prompts[3][:33] + prompts[5][:10], list(prompts[3])]


@pytest.mark.parametrize("layers_per_plane", [None, 1])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_float32_is_identical_to_transformers(
    name: str, layers_per_plane: int | None, device: str
) -> None:
    model = model_on(name, device, torch.float32)
    prompts = mixed_prompts()
    expected = [reference(model, prompt, NUM_NEW) for prompt in prompts]
    with open_llm(model, device, layers_per_plane=layers_per_plane) as llm:
        assert generate(llm, prompts) == expected
        assert generate(llm, prompts) == expected, "on cached prefixes"


def assert_only_ties_differ(model: Any, prompt: list[int], output: list[int]) -> None:
    """Each token is transformers' choice for what stands before it, or ties with it."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output], device=model.device)).logits[0].float()
    steps = logits[len(prompt) - 1 : -1]
    chosen = steps.gather(1, torch.tensor(output, device=model.device)[:, None])[:, 0]
    best, worst = steps.max(dim=1).values, steps.min(dim=1).values
    assert bool(((best - chosen) <= BF16_LOGIT_GAP * (best - worst)).all())


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_bfloat16_differs_from_transformers_only_in_ties(name: str, device: str) -> None:
    model = model_on(name, device, torch.bfloat16)
    prompts = mixed_prompts()
    with open_llm(model, device) as llm:
        outputs = generate(llm, prompts)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_only_ties_differ(model, prompt, output)


@requires_graphs
@pytest.mark.parametrize("layers_per_plane", [None, 1])
@pytest.mark.parametrize("enforce_eager", [True, False])
def test_cuda_graphs_change_nothing(
    enforce_eager: bool, layers_per_plane: int | None, device: str
) -> None:
    """bfloat16, because flash kernels, without which there are no graphs, know no float32."""
    model = model_on("llama", device, torch.bfloat16)
    prompts = mixed_prompts()
    with open_llm(
        model, device, enforce_eager=enforce_eager, layers_per_plane=layers_per_plane
    ) as llm:
        has_graphs = llm.llm_engine.runner.graphs is not None
        assert has_graphs == (device == "cuda" and not enforce_eager)
        rounds = [generate(llm, some, 40) for some in (prompts, prompts, prompts[:3])]
    for outputs in rounds:  # the second over other slots and cached prefixes, then a smaller batch
        for prompt, output in zip(prompts, outputs, strict=False):
            assert_only_ties_differ(model, prompt, output)


@requires_graphs
def test_float32_is_identical_with_graphs_asked_for(device: str) -> None:
    model = model_on("llama", device, torch.float32)
    prompts = mixed_prompts()
    expected = [reference(model, prompt, 40) for prompt in prompts]
    with open_llm(model, device, enforce_eager=False) as llm:
        assert generate(llm, prompts, 40) == expected


def test_little_memory_preempts_and_changes_nothing(device: str) -> None:
    model = model_on("llama", device, torch.float32)
    prompts = random_prompts((60, 50, 40, 70, 30, 66))
    expected = [reference(model, prompt, 40) for prompt in prompts]
    # 2 KiB a token interleaved; the budget holds about two of the six at their full length.
    chunk = {"cpu": 16 << 10, "cuda": 2 << 20}[device]
    budget = {"cpu": 512 << 10, "cuda": 4 << 20}[device]
    with open_llm(
        model, device, chunk_bytes=chunk, kv_cache_memory_bytes=budget, max_model_len=128
    ) as llm:
        assert generate(llm, prompts, 40) == expected


def test_random_requests_leave_every_invariant_intact(device: str) -> None:
    """Arrivals, lengths, sharing, sampling and aborts at random; integrity after each step."""
    rng = random.Random(1)
    model = model_on("llama", device, torch.float32)
    heads = random_prompts((20, 60, 90), seed=3)
    total, added, finished, aborted = NUM_REQUESTS[device], 0, 0, 0
    num_same = 0
    checked: dict[str, list[int]] = {}
    with open_llm(model, device, max_num_seqs=16, max_model_len=192) as llm:
        engine = llm.llm_engine
        while added < total or engine.has_unfinished_requests():
            for _ in range(min(rng.randrange(4), total - added)):
                own = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 40))]
                prompt = rng.choice([[], *heads]) + own
                greedy = rng.random() < 0.5
                params = SamplingParams(
                    temperature=0.0 if greedy else 1.0,
                    max_tokens=rng.randint(1, 24),
                    ignore_eos=True,
                    seed=added,
                )
                engine.add_request(str(added), {"prompt_token_ids": prompt}, params)
                if greedy and len(checked) < 20:
                    checked[str(added)] = prompt
                added += 1
            for output in engine.step() if engine.has_unfinished_requests() else ():
                if not output.finished:
                    continue
                finished += 1
                num_same += output.request_id in checked
                if output.request_id in checked:
                    tokens = list(output.outputs[0].token_ids)
                    assert tokens == reference(model, checked[output.request_id], len(tokens))
            if rng.random() < 0.05 and added:
                victim = str(rng.randrange(added))
                aborted += len(engine.abort_request(victim))
                checked.pop(victim, None)
            engine.manager.check_integrity()
        assert finished + aborted == total
        assert num_same > 5
        assert engine.manager.stats().num_vtensors == 0
