"""CUDA's rule of virtual aliasing: what a launch writes through one address, it touches through no
other. docs/cuda.md has the rule and the argument; here is every launch of an engine, held against
it by the stand-in driver.

The engine is a real one on the CPU, its KV stands in the stand-in's device memory, and each call of
an attention kernel is told to the stand-in as a launch with the bytes that it reads and writes.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flexinfer import LLMEngine, SamplingParams, attention, vtensor
from flexinfer.attention.base import AttentionBackend, AttentionMetadata, LayerKV
from flexinfer.attention.flash import FlashAttention
from flexinfer.attention.flash_kernels import DecodeStep, Flash2, Scores
from flexinfer.config import EngineConfig
from flexinfer.vtensor import KVSpec, VTensorManager
from helpers.flash_reference import FlashAttn2
from helpers.gpu_kit import host_tensor
from helpers.standin_cuda import Span, StandinCuda
from helpers.tiny_models import make_model, random_prompts, reference

CHUNK_BYTES = 4096
NUM_NEW = 8


def span(arena: torch.Tensor, slot: int, start: int, end: int) -> Span:
    """The bytes of tokens [start, end); REQUIRES: a layer has a plane of its own."""
    rows = arena[slot, start:end]
    assert rows.is_contiguous(), "layers side by side: the span would have others' bytes in it"
    return rows.data_ptr(), rows.numel() * rows.element_size()


class Launches(Flash2):
    """flash-attn whose calls are launches on the stand-in."""

    def __init__(self, standin: StandinCuda) -> None:
        super().__init__(FlashAttn2((torch.float32,)))
        self.standin = standin
        self.num_decodes = 0
        self.num_prefixed = 0

    def decode(
        self,
        layer: LayerKV,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata,
        step: DecodeStep,
        scores: Scores,
    ) -> torch.Tensor:
        """One launch for all decodes: it stores their new KV and reads all of it."""
        decodes = metadata.segments[: metadata.num_decodes]
        caches = (layer.k, layer.v)
        self.standin.launch(
            reads=[span(x, s.slot, 0, s.end) for x in caches for s in decodes],
            writes=[span(x, s.slot, s.start, s.end) for x in caches for s in decodes],
        )
        self.num_decodes += len(decodes) > 1
        return super().decode(layer, query, key, value, metadata, step, scores)

    def prefixed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        """KV was stored by launches before this one."""
        whole = [(x.data_ptr(), x.numel() * x.element_size()) for x in (key, value)]
        self.standin.launch(reads=whole, writes=[])
        self.num_prefixed += 1
        return super().prefixed(query, key, value, scores)


@pytest.fixture
def launches(standin: StandinCuda, monkeypatch: pytest.MonkeyPatch) -> Launches:
    standin.reset(granularity=CHUNK_BYTES)
    kernel = Launches(standin)

    def create(name: str, layers: Sequence[LayerKV]) -> AttentionBackend:
        return FlashAttention(layers, kernel, kernel)

    class OnStandin(VTensorManager):
        def __init__(self, spec: KVSpec, device: str, **options: Any) -> None:
            super().__init__(spec, "cuda", from_dlpack=host_tensor, **options)

    monkeypatch.setattr(attention, "create", create)
    monkeypatch.setattr(vtensor, "VTensorManager", OnStandin)
    return kernel


def test_no_launch_of_an_engine_breaks_the_rule(launches: Launches) -> None:
    """Shared heads, forks, whole prompts again, preemption: everything that makes aliases."""
    rng = random.Random(0)
    config = EngineConfig(
        model=make_model("llama"),
        skip_tokenizer_init=True,
        layers_per_plane=1,
        chunk_bytes=CHUNK_BYTES,
        max_num_seqs=6,
        kv_cache_memory_bytes=8 * 24 * CHUNK_BYTES,
    )
    engine = LLMEngine.from_engine_args(config)
    heads = random_prompts((40, 64, 33), seed=3)
    prompts = [rng.choice(heads) + tail for tail in random_prompts((5, 30, 1, 17, 9), seed=4)]
    prompts += [prompts[3], heads[0]]
    final = {}
    for i, prompt in enumerate(prompts):
        forks = 3 if i % 4 == 1 else 1
        engine.add_request(
            str(i), prompt, SamplingParams(temperature=0, max_tokens=NUM_NEW, n=forks)
        )
        if i % 3 == 2:
            for output in engine.step():
                final[output.request_id] = output
    while engine.has_unfinished_requests():
        for output in engine.step():
            final[output.request_id] = output
    stats = engine.manager.stats()
    assert launches.standin.violations == 0, launches.standin.last_violation
    assert stats.chunks_aliased > 20
    assert stats.chunks_copied > 0
    assert launches.num_decodes > 10
    assert launches.num_prefixed > 5
    for i, prompt in enumerate(prompts):
        for output in final[str(i)].outputs:
            assert output.token_ids == reference("llama", tuple(prompt), NUM_NEW)
    engine.close()


def test_a_path_that_breaks_the_rule_is_caught(standin: StandinCuda) -> None:
    """One request computes anew, in place, what another reads in the same launch."""
    standin.reset(granularity=CHUNK_BYTES)
    standin.set_quiet()
    spec = KVSpec(num_layers=1, num_kv_heads=2, head_dim=16, max_seq_len=256, layers_per_plane=1)
    with VTensorManager(
        spec,
        "cuda",
        max_requests=4,
        memory_budget=64 * CHUNK_BYTES,
        chunk_bytes=CHUNK_BYTES,
        from_dlpack=host_tensor,
    ) as manager:
        arena = manager.k(0)
        tokens = list(range(64))
        first = manager.create(tokens)
        first.extend(64)
        first.record_prefix(tokens)
        second = manager.create(tokens)
        assert second.num_cached_tokens == 64
        launch = functools.partial(standin.launch, reads=[span(arena, second.slot, 0, 64)])
        first.extend(65)
        assert launch(writes=[span(arena, first.slot, 64, 65)]), "what the other does not read"
        assert standin.violations == 0
        assert not launch(writes=[span(arena, first.slot, 63, 64)])
        assert standin.violations == 1
        assert "touches them through" in standin.last_violation
    standin.reset()
