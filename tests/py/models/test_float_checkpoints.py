"""Folders in fp8, nvfp4 and mxfp4: exactly the numbers of the folder, whichever way they go on."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import transformers as tf

from flexinfer.checkpoints.scaled import scaled
from flexinfer.layers.codebook import Codebook
from flexinfer.layers.quantised_linear import QuantisedLinear
from flexinfer.models.loading import load_model
from flexinfer.models.model_config import load_config
from flexinfer.models.quantisation import open_checkpoint
from flexinfer.models.stored import open_stored
from helpers.float_folders import FP4_CASES, SCALED_CASES, draw_scaled
from helpers.mixtures import CONFIGS, NUM_TOKENS, generate
from helpers.packed_cases import tiny
from helpers.packed_folders import write_experts, write_folder
from helpers.tiny_models import continue_prompt, draw_model, random_prompts

CASES = {**SCALED_CASES, **FP4_CASES}
NAMES = [f"model.layers.1.{name}.weight" for name in ("self_attn.k_proj", "mlp.down_proj")]


def checkpoint_of(folder: Path) -> Any:
    return open_checkpoint(str(folder), load_config(str(folder)))


@pytest.mark.parametrize("case", SCALED_CASES)
def test_weights_of_8_bits_are_those_numbers_bit_by_bit(case: str, tmp_path: Path) -> None:
    written = write_folder(tmp_path, tiny(), *CASES[case])
    checkpoint = checkpoint_of(tmp_path)
    stored = open_stored(checkpoint, load_config(str(tmp_path)), torch.bfloat16)
    stored.fill("model.layers.1")
    for name in NAMES:
        assert torch.equal(checkpoint.read(name), written.state_dict()[name])
        assert torch.equal(stored.model.get_parameter(name), written.state_dict()[name].bfloat16())


@pytest.mark.parametrize("case", FP4_CASES)
def test_weights_of_4_bits_are_those_numbers_bit_by_bit(case: str, tmp_path: Path) -> None:
    written = write_folder(tmp_path, tiny(), *CASES[case])
    checkpoint = checkpoint_of(tmp_path)
    for name in NAMES:
        stored = checkpoint.read_quantised(name)
        assert stored.codebook is Codebook.E2M1
        assert torch.equal(stored.dequantised(), written.state_dict()[name])


@pytest.mark.parametrize("block", [(128, 128), (1, 700), (300, 700), (7, 3), (300, 1), (1024, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_with_scales_is_that_of_each_number(
    block: tuple[int, int], dtype: torch.dtype
) -> None:
    drawn = draw_scaled(300, 700, 0, block=block, dtype=dtype)
    found = scaled(drawn.codes.view(torch.float8_e4m3fn), drawn.scales, block)
    assert torch.equal(found, drawn.weight())


def test_numbers_are_float32_whatever_torchs_default_dtype_is() -> None:
    """A program that had set it to bfloat16 got weights that were rounded to that."""
    drawn = draw_scaled(32, 64, 0, block=(32, 32), dtype=torch.float32)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = scaled(drawn.codes.view(torch.float8_e4m3fn), drawn.scales, (32, 32))
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.float32
    assert torch.equal(found, drawn.weight())


def test_fp8_may_be_named_where_the_folder_is_so(tmp_path: Path) -> None:
    write_folder(tmp_path, tiny(), *CASES["fp8"])
    found, expected = (load_model(str(tmp_path), quantization=q).model for q in ("fp8", "auto"))
    prompt = tuple(random_prompts((9,))[0])
    assert continue_prompt(found, prompt, 6) == continue_prompt(expected, prompt, 6)


@pytest.mark.parametrize("case", ["fp8", "fp8 scales in bfloat16", "fp8 static"])
def test_weights_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """Which makes numbers of them, too, without a GPU. Blocks that are cut off it takes for smaller
    ones."""
    pytest.importorskip("accelerate")
    write_folder(tmp_path, tiny(), *CASES[case])
    quantised = tf.FineGrainedFP8Config(
        dequantize=True, weight_block_size=SCALED_CASES[case][0]["weight_block_size"]
    )
    theirs = tf.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=quantised
    )
    checkpoint = checkpoint_of(tmp_path)
    for name in NAMES:
        assert torch.equal(checkpoint.read(name), theirs.state_dict()[name].float())


@pytest.mark.parametrize("quantization", ["int8", "int4", "int4-g32-zp-a8"])
@pytest.mark.parametrize("case", ["fp8", "compressed by output"])
def test_weights_of_8_bits_are_quantised_as_plain_ones_are(
    case: str, quantization: str, tmp_path: Path
) -> None:
    written = write_folder(tmp_path / "fp8", tiny(), *CASES[case])
    written.save_pretrained(tmp_path / "plain")
    prompts = random_prompts((5, 40))
    folders = [tmp_path / "fp8", tmp_path / "plain"]
    found, expected = (generate(f, prompts, quantization=quantization) for f in folders)
    assert found == expected
    model: Any = load_model(str(tmp_path / "fp8"), quantization=quantization).model
    assert isinstance(model.model.layers[0].mlp.down_proj, QuantisedLinear)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("case", ["fp8", "compressed by output", "nvfp4", "mxfp4"])
def test_experts_are_the_numbers_in_the_folder(case: str, name: str, tmp_path: Path) -> None:
    written = write_experts(tmp_path, draw_model(CONFIGS[name]()), *CASES[case])
    prompts = random_prompts((5, 40))
    expected = [continue_prompt(written, tuple(prompt), NUM_TOKENS) for prompt in prompts]
    assert generate(tmp_path, prompts) == expected


def test_experts_of_8_bits_are_quantised_as_plain_ones_are(tmp_path: Path) -> None:
    model = draw_model(CONFIGS["qwen3_moe"]())
    written = write_experts(tmp_path / "fp8", model, *CASES["fp8"])
    written.save_pretrained(tmp_path / "plain")
    prompts = random_prompts((5, 40))
    found, expected = (
        generate(tmp_path / folder, prompts, quantization="int4") for folder in ("fp8", "plain")
    )
    assert found == expected


def test_the_memory_of_weights_that_become_numbers_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_folder(tmp_path, tiny(), *CASES["fp8"])
    with caplog.at_level(logging.WARNING):
        load_model(str(tmp_path), quantization="int8")
        assert "no products" not in caplog.text
        load_model(str(tmp_path), dtype="bfloat16")
    assert "of weights by 'fp8' take 0 MiB in bfloat16" in caplog.text
