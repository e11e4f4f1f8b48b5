"""Ranks with quantised weights and KV: each quantises its own part, and all say what one process
says."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from flexinfer.config import EngineConfig
from flexinfer.distributed import group
from flexinfer.distributed.ranks import inherited_environment
from flexinfer.engine.build import build_parts
from flexinfer.errors import UnsupportedModelError
from flexinfer.layers.quantised import Scheme
from flexinfer.models.loading import load_model
from helpers.engine_kit import NUM_NEW, preempt_at_random, run, submit
from helpers.packed_folders import awq, draw_numbers, write_folder
from helpers.rank_kit import children, folder_of, make_ranked_engine
from helpers.slow_products import BY_ROUNDING, furthest_behind, slow_model
from helpers.tiny_models import make_model, random_prompts

PROMPTS = random_prompts((20, 33, 7, 41, 12))


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("llama", "int8"),
        ("tied", "int8"),
        ("mixtral", "int8"),
        ("wide_mlp", "int4"),
        ("wide_mlp", "int4-zp-a8"),
    ],
)
def test_tokens_are_those_of_slow_products_of_the_parts(name: str, scheme: str) -> None:
    engine = make_ranked_engine(name, quantization=scheme)
    try:
        final = run(engine, PROMPTS, NUM_NEW)
    finally:
        engine.close()
    slow = slow_model(name, Scheme.parse(scheme), 2)
    for i, prompt in enumerate(PROMPTS):
        # The head rounds its inputs, which a sum of parts may have a rounding error away.
        assert furthest_behind(slow, prompt, final[str(i)].outputs[0].token_ids) <= 0.04


def test_a_rank_has_its_part_of_the_quantised_weights() -> None:
    whole = load_model(folder_of("wide_mlp"), quantization="int4", device="cpu").model
    layers = [m for m in whole.modules() if hasattr(m, "nbytes")]
    plain = sum(p.nbytes for p in whole.parameters())
    engine = make_ranked_engine("wide_mlp", quantization="int4")
    try:
        assert engine.ranks is not None
        for of_rank in engine.ranks.weight_bytes.values():
            assert of_rank == pytest.approx((sum(m.nbytes for m in layers) + plain) / 2, rel=0.1)
    finally:
        engine.close()


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e4m3"])
def test_quantised_kv_on_ranks_is_that_of_one_process(kv_dtype: str) -> None:
    """A scale is of one token and head, and a rank has whole heads. With forced swaps."""
    expected = {}
    for num_ranks in (1, 2):
        swap = {"swap_space": "4MiB", "preemption_mode": "swap"}
        engine = make_ranked_engine("llama", num_ranks, kv_cache_dtype=kv_dtype, **swap)
        try:
            submit(engine, PROMPTS)
            final, rng = {}, random.Random(1)
            while engine.has_unfinished_requests():
                preempt_at_random(engine, rng, 0.3)
                final.update({output.request_id: output for output in engine.step()})
            assert sum(engine.stats().preemptions["swap"].values()) > 0
            assert engine.manager.spec.bytes_per_token == 2 * 4 * (16 + 4) * (2 // num_ranks)
        finally:
            engine.close()
        tokens = {name: output.outputs[0].token_ids for name, output in final.items()}
        assert tokens == (expected := expected or tokens)


@pytest.mark.parametrize("quantization", ["auto", "int8"])
def test_ranks_on_cpus_of_other_kinds_compute_the_same_rows(
    quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How a weight lies in memory, and so how many rows are computed at once, is the CPU's choice;
    gloo ends a process that gets more than it expects."""
    here = inherited_environment()
    monkeypatch.setattr(group, "inherited_environment", lambda: {**here, "FLEXINFER_SIMD": "avx2"})
    engine = make_ranked_engine("wide_mlp", quantization=quantization)
    try:
        final = run(engine, PROMPTS, NUM_NEW)
    finally:
        engine.close()
    slow = make_model("wide_mlp")
    if quantization != "auto":
        slow = slow_model("wide_mlp", Scheme.parse(quantization), 2)
    for i, prompt in enumerate(PROMPTS):
        assert furthest_behind(slow, prompt, final[str(i)].outputs[0].token_ids) <= BY_ROUNDING


@pytest.mark.parametrize(
    ("name", "scheme", "message"),
    [
        ("llama", "int4", r"down_proj has 48 inputs on each of 2 ranks, .* no multiple of 32"),
        ("llama", "int5", "quantization must be auto, int8, or int4"),
    ],
)
def test_parts_that_cannot_be_quantised_are_refused_before_a_rank_is_started(
    name: str, scheme: str, message: str
) -> None:
    before = children()
    with pytest.raises((UnsupportedModelError, ValueError), match=message):
        make_ranked_engine(name, quantization=scheme)
    assert children() == before


def test_weights_that_are_quantised_already_are_refused_before_a_rank_is_started(
    tmp_path: Path,
) -> None:
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    write_folder(
        tmp_path,
        make_model("wide_mlp"),
        settings | {"zero_point": True},
        lambda outputs, inputs, seed: draw_numbers(outputs, inputs, 32, 4, False, seed),
        awq,
    )
    before = children()
    config = EngineConfig(
        model=str(tmp_path), tensor_parallel_size=2, skip_tokenizer_init=True, device="cpu"
    )
    with pytest.raises(UnsupportedModelError, match="quantise them by `quantization`"):
        build_parts(config)
    assert children() == before
