"""Every family that is promised, in every layout, whatever happens to its requests: slow.

Each run is a mixed batch: prompts from one token to eight windows, some with shared heads, computed
in parts, some forked, all preempted at random by swapping or computing again, and a next turn of
each from the prefix cache. `test_families.py` and `test_hybrid_models.py` have a part of each.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer import LLMEngine, SamplingParams
from helpers import families, hybrids
from helpers.engine_kit import drain, make_engine
from helpers.tiny_models import random_prompts

pytestmark = pytest.mark.slow

NUM_NEW = 10
PROMISED = (
    *("gemma2", "gemma3", "gemma3n", "gemma4", "gpt_oss", "mistral", "cohere2", "olmo3", "exaone4"),
    *("mimo_v2", "llama4", "phi3", "deepseek_v2", "deepseek_v3"),
    *("qwen3_next", "bamba", "granitemoehybrid", "jamba", "nemotron_h"),
)


def model_of(name: str) -> Any:
    is_hybrid = name in hybrids.HYBRIDS
    return hybrids.make_hybrid(name) if is_hybrid else families.make_family(name)


def continuation(name: str, prompt: list[int]) -> list[int]:
    kind = hybrids if name in hybrids.HYBRIDS else families
    return kind.continuation(name, tuple(prompt), NUM_NEW)


def turn(engine: LLMEngine, prompts: list[list[int]], rng: Random) -> list[list[int]]:
    """What each prompt is answered with; of every third one three samples are drawn."""
    for i, prompt in enumerate(prompts):
        params = SamplingParams(n=3 if i % 3 == 0 else 1, temperature=0, max_tokens=NUM_NEW)
        engine.add_request(str(i), prompt, params)
    final = drain(engine, rng, 0.2)
    for output in final.values():
        assert len({tuple(sample.token_ids) for sample in output.outputs}) == 1
    return [final[str(i)].outputs[0].token_ids for i in range(len(prompts))]


@pytest.mark.parametrize("caches", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("layers_per_plane", [None, 1], ids=["interleaved", "dense"])
@pytest.mark.parametrize("chunk_kib", [4, 64, 2048])
@pytest.mark.parametrize("name", PROMISED)
def test_tokens_are_those_of_transformers(
    name: str, chunk_kib: int, layers_per_plane: int | None, caches: bool
) -> None:
    rng = Random(f"{name} {chunk_kib} {layers_per_plane} {caches}")
    mode = "swap" if caches == (layers_per_plane is None) else "recompute"
    settings = {"state_snapshot_tokens": 16} if name in hybrids.HYBRIDS else {}
    engine = make_engine(
        model_of(name),
        max_num_seqs=6,
        kv_cache_memory_bytes=(16 << 20) if chunk_kib < 2048 else (512 << 20),
        chunk_bytes=chunk_kib << 10,
        layers_per_plane=layers_per_plane,
        max_num_batched_tokens=rng.choice([16, 48]),
        max_model_len=220,
        preemption_mode=mode,
        swap_space="512MiB",
        enable_prefix_caching=caches,
        **settings,
    )
    prompts = random_prompts((130, 1, 40, 17, 75), seed=chunk_kib)
    prompts[4][:50] = prompts[0][:50]
    answers = turn(engine, prompts, rng)
    assert answers == [continuation(name, prompt) for prompt in prompts]
    prompts = [p + answer + [7, 8] for p, answer in zip(prompts, answers, strict=True)]
    assert turn(engine, prompts, rng) == [continuation(name, prompt) for prompt in prompts]
    assert sum(engine.stats().preemptions[mode].values()) > 0
    engine.close()
