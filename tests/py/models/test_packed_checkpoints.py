"""GPTQ, AWQ, compressed-tensors and fp8: exactly the numbers of the folder; refusals by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import transformers as tf
from safetensors.torch import load_file, save_file

from flexinfer.checkpoints.checkpoint import Checkpoint
from flexinfer.errors import UnsupportedModelError
from flexinfer.layers.quantised_linear import QuantisedLinear
from flexinfer.models.loading import load_model
from flexinfer.models.model_config import load_config
from flexinfer.models.quantisation import choose_scheme, open_checkpoint
from helpers.float_folders import FP4_CASES, SCALED_CASES
from helpers.mixtures import NUM_TOKENS, generate
from helpers.packed_cases import (
    AWQ,
    BYTES,
    CASES,
    GPTQ,
    INPUTS,
    OWN,
    W4,
    W8,
    changed,
    compressed_settings,
    fixed,
    tiny,
)
from helpers.packed_folders import compressed_bytes, gptq, write_folder
from helpers.slow_products import BY_ROUNDING, furthest_behind, with_byte_inputs
from helpers.tiny_models import CONFIGS, continue_prompt, draw_model, random_prompts

QUANTISED_CASES = {**CASES, **FP4_CASES}
ALL_CASES = {**QUANTISED_CASES, **SCALED_CASES}
"""With those that are read as numbers."""


@pytest.mark.parametrize("case", ALL_CASES)
def test_greedy_tokens_are_those_of_the_numbers_in_the_folder(case: str, tmp_path: Path) -> None:
    written = write_folder(tmp_path, tiny(), *ALL_CASES[case])
    prompts = random_prompts((5, 40))
    expected = [continue_prompt(written, tuple(prompt), NUM_TOKENS) for prompt in prompts]
    assert generate(tmp_path, prompts) == expected


def checkpoint_of(folder: Path) -> Checkpoint:
    checkpoint = open_checkpoint(str(folder), load_config(str(folder)))
    assert checkpoint is not None
    return checkpoint


@pytest.mark.parametrize("case", QUANTISED_CASES)
def test_with_inputs_of_8_bits_tokens_are_those_of_slow_products(case: str, tmp_path: Path) -> None:
    written = write_folder(tmp_path, tiny(), *QUANTISED_CASES[case])
    slow = with_byte_inputs(written, checkpoint_of(tmp_path))
    prompts = random_prompts((5, 40))
    answers = generate(tmp_path, prompts, quantization="a8")
    for prompt, generated in zip(prompts, answers, strict=True):
        assert furthest_behind(slow, prompt, generated) <= BY_ROUNDING


@pytest.mark.parametrize("case", CASES)
def test_inputs_of_quantised_layers_alone_get_8_bits(case: str, tmp_path: Path) -> None:
    written = write_folder(tmp_path, tiny(), *CASES[case])
    model: Any = load_model(str(tmp_path), dtype="float32", quantization="a8").model
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(0))
    stored = checkpoint_of(tmp_path).read_quantised("model.layers.1.self_attn.o_proj.weight")
    expected = stored.with_byte_inputs().reference(x).float()
    torch.testing.assert_close(model.model.layers[1].self_attn.o_proj(x), expected)
    assert (stored.reference(x).float() - expected).norm() > 1e-3 * expected.norm()
    torch.testing.assert_close(model.lm_head(x), written.lm_head(x))


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_numbers_bit_by_bit(case: str, tmp_path: Path) -> None:
    written = write_folder(tmp_path, tiny(), *CASES[case])
    checkpoint = checkpoint_of(tmp_path)
    for name in ("self_attn.k_proj", "mlp.down_proj"):
        name = f"model.layers.1.{name}.weight"
        stored = checkpoint.read_quantised(name).dequantised()
        assert torch.equal(stored, written.state_dict()[name])


def test_inputs_of_8_bits_go_with_weights_of_8_bits(tmp_path: Path) -> None:
    settings = compressed_settings(BYTES, INPUTS, "int-quantized")
    written = write_folder(tmp_path, tiny(), settings, fixed(0, 8, True), compressed_bytes)
    slow = with_byte_inputs(written, checkpoint_of(tmp_path))
    prompt = random_prompts((40,))[0]
    (generated,) = generate(tmp_path, [prompt])
    assert furthest_behind(slow, prompt, generated) <= BY_ROUNDING
    assert generate(tmp_path, [prompt], quantization="a8") == [generated]


def test_parts_of_one_layer_are_one_product_and_the_head_stays(tmp_path: Path) -> None:
    write_folder(tmp_path, tiny(), *CASES["awq"])
    model: Any = load_model(str(tmp_path)).model
    assert isinstance(model.model.layers[0].self_attn.qkv_proj, QuantisedLinear)
    assert not isinstance(model.lm_head, QuantisedLinear)


def test_a_bias_that_only_the_checkpoint_has_is_added(tmp_path: Path) -> None:
    """AutoGPTQ writes one for each layer."""
    written = write_folder(tmp_path, tiny(), *CASES["gptq"])
    tensors = load_file(tmp_path / "model.safetensors")
    bias = torch.randn(64, generator=torch.Generator().manual_seed(0))
    tensors["model.layers.0.self_attn.o_proj.bias"] = bias
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    prompt = tuple(random_prompts((20,))[0])
    before = continue_prompt(written, prompt, NUM_TOKENS)
    written.model.layers[0].self_attn.o_proj.bias = torch.nn.Parameter(bias)
    expected = continue_prompt(written, prompt, NUM_TOKENS)
    assert expected != before
    assert generate(tmp_path, [list(prompt)]) == [expected]


@pytest.mark.parametrize("case", [case for case in CASES if "gptq" not in case])
def test_layers_of_8_outputs(case: str, tmp_path: Path) -> None:
    """Zero points of one word: torch took no view of their bytes."""
    config = CONFIGS["llama"]()
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 8, 1, 8
    written = write_folder(tmp_path, draw_model(config), *CASES[case])
    name = "model.layers.0.self_attn.k_proj.weight"
    stored = checkpoint_of(tmp_path).read_quantised(name).dequantised()
    assert torch.equal(stored, written.state_dict()[name])


def test_tokens_that_end_an_answer_are_those_of_the_generation_config(tmp_path: Path) -> None:
    """As in folders of chat models, where config.json names the end of a text alone."""
    write_folder(tmp_path, tiny(), *CASES["gptq"])
    assert load_model(str(tmp_path)).eos_token_ids == frozenset()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert load_model(str(tmp_path)).eos_token_ids == {5, 7}


def test_the_key_of_early_compressed_tensors_is_read(tmp_path: Path) -> None:
    """Its integers were taken for weights."""
    written = write_folder(tmp_path, tiny(), *CASES["compressed 8 bits"])
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(
        text.replace('"quantization_config"', '"compression_config"')
    )
    prompt = random_prompts((20,))[0]
    expected = continue_prompt(written, tuple(prompt), NUM_TOKENS)
    assert generate(tmp_path, [prompt]) == [expected]


def test_scales_that_the_config_says_nothing_of_are_refused(tmp_path: Path) -> None:
    settings = compressed_settings(BYTES, INPUTS, "int-quantized")
    write_folder(tmp_path, tiny(), settings, fixed(0, 8, True), compressed_bytes)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"weight_scale.*no quantization_config"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("case", "part", "rows"),
    [
        ("gptq", "qzeros", 1),
        ("gptq", "scales", 1),
        ("awq", "scales", 1),
        ("compressed", "weight_scale", 32),
        ("compressed asymmetric", "weight_zero_point", 4),
    ],
)
def test_parts_of_other_sizes_than_their_weight_are_refused_by_name(
    case: str, part: str, rows: int, tmp_path: Path
) -> None:
    write_folder(tmp_path, tiny(), *CASES[case])
    name = f"model.layers.0.self_attn.q_proj.{part}"
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[name] = tensors[name][:rows].clone()
    for key in [key for key in tensors if key.endswith("g_idx")]:
        del tensors[key]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"0\.self_attn\.q_proj cannot be read: scales"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quantised already, by 'bitsandbytes'"),
        ({"quant_method": ["gptq"]}, r"quantised already, by \"\['gptq'\]\""),
        ({"quant_method": "quark"}, "quantised already, by 'quark'.*known: gguf, awq.*fp8"),
        (changed(GPTQ, "bits", 3), "'gptq' with bits = 3.*known: 4, 8"),
        (changed(GPTQ, "bits", 4.0), "'gptq' with bits = 4.0.*known: 4, 8"),
        (changed(GPTQ, "checkpoint_format", "marlin"), "checkpoint_format = 'marlin'"),
        (changed(GPTQ, "dynamic", {"-:x": {}}), "dynamic = "),
        (changed(AWQ, "version", "gemv"), "'awq' with version = 'gemv'"),
        (changed(W4, "format", "marlin-24"), "format = 'marlin-24'.*known: .*'nvfp4-pack"),
        (changed(W4, "format", "float-quantized"), "type = 'int' cannot be read"),
        (changed(W4, "kv_cache_scheme", {"num_bits": 8}), "kv_cache_scheme = "),
        (changed(W4, "sparsity_config", {"format": "sparse-24"}), "sparsity_config = "),
        (changed(W4, "config_groups/group_1", {}), r"in 2 ways \(config_groups\)"),
        (changed(W4, "config_groups", [1]), r"with \[1\] in config_groups"),
        (changed(W4, OWN, None), "with None in config_groups"),
        (changed(W4, f"{OWN}/weights", 5), "with 5 in weights"),
        (changed(W4, f"{OWN}/weights/symmetric", "no"), "symmetric = 'no'"),
        (changed(W4, f"{OWN}/weights/type", "float"), "type = 'float'"),
        (changed(W4, f"{OWN}/weights/actorder", "group"), "actorder = 'group'"),
        (changed(W4, f"{OWN}/weights/num_bits", 3), "num_bits = 3"),
        (changed(W8, f"{OWN}/input_activations/dynamic", False), "dynamic = False"),
        (changed(W8, f"{OWN}/input_activations/symmetric", False), "symmetric = False"),
        (changed(W8, f"{OWN}/weights/strategy", "tensor"), "strategy = 'tensor'"),
        (changed(W8, "format", "pack-quantized"), "format = 'pack-quantized'.*: 'int-quantized'"),
    ],
)
def test_what_is_not_known_is_refused_before_any_tensor_is_read(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = tf.LlamaConfig(**CONFIGS["llama"]().to_dict())
    config.save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**text, "quantization_config": settings}))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(str(tmp_path))


def test_groups_whose_inputs_lie_apart_are_refused_by_name(tmp_path: Path) -> None:
    def parts_of(numbers: Any) -> dict[str, torch.Tensor]:
        parts = gptq(numbers, 4)
        return {**parts, "g_idx": parts["g_idx"].flip(0)}

    write_folder(tmp_path, tiny(), {**GPTQ, "desc_act": True}, fixed(32), parts_of)
    with pytest.raises(UnsupportedModelError, match="desc_act, activation order"):
        load_model(str(tmp_path))


def cut_short(pack: Any) -> Any:
    """With groups of 40 of 64 or 96 inputs: there are as many as of 32."""

    def parts_of(numbers: Any) -> dict[str, torch.Tensor]:
        parts: dict[str, torch.Tensor] = pack(numbers)
        if "g_idx" in parts:
            parts["g_idx"] = torch.arange(len(parts["g_idx"]), dtype=torch.int32) // 40
        return parts

    return parts_of


@pytest.mark.parametrize("case", ["gptq", "awq", "compressed"])
def test_a_last_group_that_is_cut_short_is_said_to_be_that(case: str, tmp_path: Path) -> None:
    """Of 96 inputs in groups of 40 there are three, as if they were of 32."""
    settings, draw, pack = CASES[case]
    where = f"{OWN}/weights/group_size" if case == "compressed" else "group_size"
    write_folder(tmp_path, tiny(), changed(settings, where, 40), draw, cut_short(pack))
    message = r"96 inputs are no whole number of groups of 40 \(group_size\): the last one has 16"
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(str(tmp_path))


@pytest.mark.parametrize("case", ["gptq", "awq", "compressed"])
@pytest.mark.parametrize(("size", "message"), [(16, "size 16"), (-1, "size -1"), (0, "size = 0")])
def test_groups_of_another_size_than_the_settings_say_are_refused(
    case: str, size: int, message: str, tmp_path: Path
) -> None:
    settings, draw, pack = CASES[case]
    where = f"{OWN}/weights/group_size" if case == "compressed" else "group_size"
    write_folder(tmp_path, tiny(), changed(settings, where, size), draw, pack)
    with pytest.raises(UnsupportedModelError, match=f"group_{message}"):
        load_model(str(tmp_path))


def test_tensors_that_would_be_passed_over_are_refused_by_name(tmp_path: Path) -> None:
    write_folder(tmp_path, tiny(), *CASES["compressed"])
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"has model\.layers\.0\.self_attn\.k_scale"):
        load_model(str(tmp_path))


def test_inputs_of_8_bits_alone_are_refused_for_weights_that_are_not_quantised(
    tmp_path: Path,
) -> None:
    tiny().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()  # refused before any weight is read
    with pytest.raises(UnsupportedModelError, match=r"'a8'.*are not: take 'int8' or 'int4-a8'"):
        load_model(str(tmp_path), quantization="a8")
    with pytest.raises(UnsupportedModelError, match="a model that is loaded already stays"):
        load_model(tiny(), quantization="a8")


@pytest.mark.parametrize("case", ["awq", "gptq", "compressed"])
def test_its_own_method_may_be_named_as_vllms_programs_do(case: str, tmp_path: Path) -> None:
    write_folder(tmp_path, tiny(), *CASES[case])
    config = load_config(str(tmp_path))
    checkpoint = open_checkpoint(str(tmp_path), config)
    assert checkpoint is not None
    assert (
        choose_scheme(str(tmp_path), config, "auto", "cpu", checkpoint.method, checkpoint) is None
    )
    with pytest.raises(
        UnsupportedModelError, match=r"'fp8' is a method .* this model's weights are"
    ):
        load_model(str(tmp_path), quantization="fp8")


def test_a_method_does_not_go_with_weights_that_are_not_quantised(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="weights are not quantised; leave"):
        load_model(str(tmp_path), quantization="gptq")


def test_a_scheme_of_ours_does_not_go_with_theirs(tmp_path: Path) -> None:
    write_folder(tmp_path, tiny(), *CASES["awq"])
    with pytest.raises(UnsupportedModelError, match="quantised already, by 'awq'"):
        load_model(str(tmp_path), quantization="int8")
