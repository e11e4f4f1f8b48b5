"""Mixtures of experts in folders of GPTQ, AWQ and compressed-tensors: exactly the numbers of each
expert's own tensors; refusals by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import transformers as tf
from safetensors.torch import load_file, save_file

from flexinfer.errors import UnsupportedModelError
from flexinfer.layers.experts import Experts
from flexinfer.models.loading import load_model
from flexinfer.models.model_config import load_config
from flexinfer.models.quantisation import open_checkpoint
from helpers import packed_cases
from helpers.mixtures import COMMON, CONFIGS, NUM_TOKENS, generate
from helpers.packed_cases import BYTES, INPUTS, compressed_settings, fixed
from helpers.packed_folders import (
    compressed_bytes,
    write_experts,
)
from helpers.slow_products import BY_ROUNDING, furthest_behind, with_byte_inputs
from helpers.tiny_models import continue_prompt, draw_model, random_prompts

CASES = {
    name: packed_cases.CASES[name]
    for name in (
        *("gptq", "gptq symmetric", "gptq 8 bits", "awq"),
        *("compressed", "compressed asymmetric"),
    )
}


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "qwen2_moe", "gemma4_text", "nemotron_h"])
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_the_numbers_in_the_folder(
    case: str, name: str, tmp_path: Path
) -> None:
    written = write_experts(tmp_path, draw_model(CONFIGS[name]()), *CASES[case])
    prompts = random_prompts((5, 40))
    expected = [continue_prompt(written, tuple(prompt), NUM_TOKENS) for prompt in prompts]
    assert generate(tmp_path, prompts) == expected


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "gemma4_text", "nemotron_h"])
@pytest.mark.parametrize("case", CASES)
def test_with_inputs_of_8_bits_tokens_are_those_of_slow_products(
    case: str, name: str, tmp_path: Path
) -> None:
    written = write_experts(tmp_path, draw_model(CONFIGS[name]()), *CASES[case])
    checkpoint = open_checkpoint(str(tmp_path), load_config(str(tmp_path)))
    assert checkpoint is not None
    slow = with_byte_inputs(written, checkpoint)
    # A rounded input may also choose another expert, and such prompts are no test.
    prompts = random_prompts((5, 40), seed=3)
    answers = generate(tmp_path, prompts, quantization="a8")
    for prompt, generated in zip(prompts, answers, strict=True):
        assert furthest_behind(slow, prompt, generated) <= BY_ROUNDING


def test_inputs_of_8_bits_go_with_weights_of_8_bits(tmp_path: Path) -> None:
    settings = compressed_settings(BYTES, INPUTS, "int-quantized")
    draw = fixed(0, 8, True)
    write_experts(tmp_path, draw_model(CONFIGS["mixtral"]()), settings, draw, compressed_bytes)
    model: Any = load_model(str(tmp_path), dtype="float32").model
    experts = model.model.layers[0].mlp.experts
    assert isinstance(experts, Experts)
    count = experts.num_experts
    assert experts.nbytes == count * (3 * 96 * 64 + (2 * 96 + 64) * (4 + 4))


def test_experts_that_are_not_quantised_beside_layers_that_are(tmp_path: Path) -> None:
    written = write_experts(
        tmp_path, draw_model(CONFIGS["mixtral"]()), *CASES["gptq"], has_plain_experts=True
    )
    prompts = random_prompts((5, 40))
    expected = [continue_prompt(written, tuple(prompt), NUM_TOKENS) for prompt in prompts]
    assert generate(tmp_path, prompts) == expected


def rewritten(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


PREFIX = "model.layers.1.block_sparse_moe.experts"


def test_an_expert_that_lacks_is_refused_by_name(tmp_path: Path) -> None:
    write_experts(tmp_path, draw_model(CONFIGS["mixtral"]()), *CASES["awq"])

    def without_one(tensors: dict[str, Any]) -> None:
        for name in [n for n in tensors if n.startswith(f"{PREFIX}.2.w3.")]:
            del tensors[name]

    rewritten(tmp_path, without_one)
    with pytest.raises(UnsupportedModelError, match=r"lacks model\.layers\.1\.mlp\.experts\.2\.up"):
        load_model(str(tmp_path))


def test_an_expert_that_is_not_the_models_is_refused_by_name(tmp_path: Path) -> None:
    write_experts(tmp_path, draw_model(CONFIGS["mixtral"]()), *CASES["awq"])
    one = r"model\.layers\.1\.mlp\.experts\.4\.down_proj"

    def with_one_more(tensors: dict[str, Any]) -> None:
        for name in [n for n in tensors if n.startswith(f"{PREFIX}.3.")]:
            tensors[name.replace(".3.", ".4.")] = tensors[name].clone()

    rewritten(tmp_path, with_one_more)
    with pytest.raises(UnsupportedModelError, match=f"has {one}"):
        load_model(str(tmp_path))


def test_an_expert_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    write_experts(tmp_path, draw_model(CONFIGS["mixtral"]()), *CASES["awq"])

    def shorter(tensors: dict[str, Any]) -> None:
        for part in ("qweight", "qzeros", "scales"):
            name = f"{PREFIX}.1.w1.{part}"
            half = tensors[name].shape[1] // 2
            tensors[name] = tensors[name][:, :half].contiguous()

    rewritten(tmp_path, shorter)
    with pytest.raises(UnsupportedModelError, match=r"experts\.1\.gate_proj\.weight is \[48, 64\]"):
        load_model(str(tmp_path))


def test_experts_of_which_some_are_quantised_are_refused_by_name(tmp_path: Path) -> None:
    write_experts(tmp_path, draw_model(CONFIGS["mixtral"]()), *CASES["awq"])

    def plain(tensors: dict[str, Any]) -> None:
        for name in [n for n in tensors if n.startswith(f"{PREFIX}.1.w1.")]:
            del tensors[name]
        tensors[f"{PREFIX}.1.w1.weight"] = torch.zeros(96, 64)

    rewritten(tmp_path, plain)
    message = r"layers\.1\.mlp\.experts has experts whose weights are quantised and others.*1\.gate"
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(str(tmp_path))


def test_groups_of_an_expert_that_lie_apart_are_refused_by_name(tmp_path: Path) -> None:
    write_experts(tmp_path, draw_model(CONFIGS["mixtral"]()), *CASES["gptq"])

    def flipped(tensors: dict[str, Any]) -> None:
        name = f"{PREFIX}.0.w1.g_idx"
        tensors[name] = tensors[name].flip(0).contiguous()

    rewritten(tmp_path, flipped)
    with pytest.raises(UnsupportedModelError, match=r"experts\.0\.gate_proj.*desc_act"):
        load_model(str(tmp_path))


def test_experts_whose_code_is_not_known_are_refused_by_name(tmp_path: Path) -> None:
    config = tf.MixtralConfig(**COMMON, num_local_experts=4, hidden_act="gelu")
    write_experts(tmp_path, draw_model(config), *CASES["awq"])
    with pytest.raises(UnsupportedModelError, match=r"lacks model\.layers\.0\.mlp\.experts"):
        load_model(str(tmp_path))
