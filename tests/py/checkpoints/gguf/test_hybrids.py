"""Models of GGUF files in which some layers have a state in place of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")

from flexinfer.checkpoints.gguf.checkpoint import load_gguf_config
from flexinfer.errors import UnsupportedModelError
from flexinfer.models.loading import load_model
from helpers.gguf.files import Type, add_weights, finish, write_gguf, writer_of
from helpers.gguf.models import CONFIGS, mixed, same
from helpers.mixtures import NUM_TOKENS, generate
from helpers.tiny_models import continue_prompt, draw_model, random_prompts

KV_HEADS = "attention.head_count_kv"
FEW = 3072
"""Numbers of the largest weight that is kept as numbers: a convolution's, or a router's."""


def expected(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    return [continue_prompt(model, tuple(prompt), NUM_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("name", ["lfm2", "lfm2moe"])
def test_matrices_of_mixers_stay_quantised(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, draw_model(CONFIGS[name]()), mixed)
    model: Any = load_model(str(path)).model
    assert max(parameter.numel() for parameter in model.parameters()) <= FEW
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_the_correction_by_which_experts_are_chosen(tmp_path: Path) -> None:
    path, model = tmp_path / "model.gguf", draw_model(CONFIGS["lfm2moe"]())
    prompts = random_prompts((40,))
    before = expected(model, prompts)
    model.model.layers[1].feed_forward.expert_bias.copy_(torch.linspace(-1, 1, 6))
    written = write_gguf(path, model, same(Type.F32))
    assert expected(written, prompts) != before
    assert generate(path, prompts) == expected(written, prompts)


def write_with(path: Path, name: str, key: str, add: Callable[[Any, str], None]) -> str:
    """A file with another value of this key, which `add` writes, or none."""
    model = draw_model(CONFIGS[name]())
    writer = writer_of(path, model)
    whole = f"{writer.arch}.{key}"
    writer.kv_data[0].pop(whole, None)
    add(writer, whole)
    add_weights(writer, model, same(Type.F32))
    finish(writer)
    return str(path)


@pytest.mark.parametrize(
    ("heads", "known"),
    [
        ([0, 2, 0], "a number, or one for each of 2 layers"),
        ([0, -2], "a number, or one for each of 2 layers"),
        ([1, 2], "one number for all layers that attend, and at least one of them"),
        ([0, 0], "one number for all layers that attend, and at least one of them"),
        ([0, 3], "only divisors of the head_count, 4"),
    ],
)
def test_heads_of_layers_that_cannot_be_are_refused(
    heads: list[int], known: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_with(path, "lfm2", KV_HEADS, lambda writer, key: writer.add_array(key, heads))
    with pytest.raises(UnsupportedModelError, match=f"{KV_HEADS} = .*; known: {known}"):
        load_gguf_config(str(path))


@pytest.mark.parametrize(
    ("name", "key", "value", "known"),
    [
        ("lfm2", "attention.head_count", 8, "only heads of 64 that make up 256 rows of queries"),
        ("lfm2", "attention.value_length", 32, "only the width of keys, 64"),
        ("lfm2", "rope.dimension_count", 32, "only the width of keys, 64"),
        ("lfm2", "shortconv.l_cache", 0, "whole numbers from 1 on"),
        ("lfm2moe", "expert_gating_func", 1, "only 2, sigmoid"),
    ],
)
def test_values_that_are_not_known_are_refused(
    name: str, key: str, value: int, known: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_with(path, name, key, lambda writer, whole: writer.add_uint32(whole, value))
    with pytest.raises(UnsupportedModelError, match=f"{key} = {value}; known: {known}"):
        load_gguf_config(str(path))


@pytest.mark.parametrize("key", ["shortconv.l_cache", "expert_gating_func"])
def test_values_that_lack_are_named(key: str, tmp_path: Path) -> None:
    write_with(tmp_path / "model.gguf", "lfm2moe", key, lambda writer, whole: None)
    with pytest.raises(UnsupportedModelError, match=f"has no lfm2moe.{key}"):
        load_gguf_config(str(tmp_path / "model.gguf"))


def test_a_file_that_says_of_no_layer_that_it_is_dense(tmp_path: Path) -> None:
    key = "leading_dense_block_count"
    write_with(tmp_path / "model.gguf", "lfm2moe", key, lambda writer, whole: None)
    assert load_gguf_config(str(tmp_path / "model.gguf")).num_dense_layers == 0
