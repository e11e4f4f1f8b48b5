"""Experts in MXFP4, as OpenAI publishes gpt-oss: exactly the numbers of the folder; refusals by
name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from flexinfer.checkpoints.checkpoint import EXPERT_PARTS, expert_weight
from flexinfer.checkpoints.mxfp4 import Mxfp4Checkpoint, mxfp4_tensor
from flexinfer.errors import UnsupportedModelError
from flexinfer.layers.experts import Experts
from flexinfer.layers.fuse_experts import read_all
from flexinfer.models.loading import load_model
from flexinfer.models.model_config import load_config
from flexinfer.models.quantisation import open_checkpoint
from flexinfer.models.stored import open_stored
from helpers.mixtures import NUM_TOKENS, generate
from helpers.mxfp4_folders import SETTINGS, config, draw, numbers, write_folder
from helpers.packed_folders import edit
from helpers.slow_products import BY_ROUNDING, furthest_behind, with_byte_inputs
from helpers.tiny_models import continue_prompt, draw_model, random_prompts

PATH = "model.layers.1.mlp.experts"


def checkpoint_of(folder: Path) -> Any:
    checkpoint = open_checkpoint(str(folder), load_config(str(folder)))
    assert isinstance(checkpoint, Mxfp4Checkpoint)
    return checkpoint


def expert(checkpoint: Any, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Its gates, factors and what outputs are made with, each with rows of inputs."""
    gate, up, down = (
        checkpoint.read_quantised(expert_weight(PATH, number, part)).dequantised()
        for part in EXPERT_PARTS
    )
    return gate, up, down


def test_weights_are_the_numbers_of_the_specification(tmp_path: Path) -> None:
    written = write_folder(tmp_path, draw_model(config())).get_submodule(PATH)
    checkpoint = checkpoint_of(tmp_path)
    for number in range(4):
        gate, up, down = expert(checkpoint, number)
        assert torch.equal(gate, written.gate_up_proj[number, :, ::2].T)
        assert torch.equal(up, written.gate_up_proj[number, :, 1::2].T)
        assert torch.equal(down, written.down_proj[number].T)


def test_weights_are_those_of_transformers_bit_by_bit(tmp_path: Path) -> None:
    write_folder(tmp_path, draw_model(config()))
    checkpoint, tensors = checkpoint_of(tmp_path), load_file(tmp_path / "model.safetensors")
    gate_up, down = (
        convert_moe_packed_tensors(*(tensors[f"{PATH}.{name}_{e}"] for e in ("blocks", "scales")))
        for name in ("gate_up_proj", "down_proj")
    )
    for number in range(4):
        own = [part.bfloat16() for part in expert(checkpoint, number)]
        assert torch.equal(torch.stack(own[:2], dim=1).flatten(0, 1), gate_up[number].T)
        assert torch.equal(own[2], down[number].T)


def test_every_exponent_is_a_power_of_two_exactly() -> None:
    """0 and 1 are below the smallest normal number of float32, the table being doubled."""
    blocks = torch.arange(16, dtype=torch.uint8).repeat(252, 1) * 0x11
    exponents = torch.arange(252, dtype=torch.uint8)[:, None]
    nibbles = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(1)
    found = mxfp4_tensor(nibbles, exponents)
    assert torch.equal(found.dequantised().double(), numbers(blocks[:, None], exponents))
    assert found.is_finite
    zeros = mxfp4_tensor(nibbles[:1] & 8, exponents[:1])
    assert not zeros.dequantised().any()
    assert zeros.scales.item() == 1
    assert not mxfp4_tensor(nibbles[:1], torch.tensor([[255]], dtype=torch.uint8)).is_finite


def stored_layers(folder: Path) -> Any:
    """The decoder layers of the model with what the folder has, before anything is replaced."""
    stored = open_stored(checkpoint_of(folder), load_config(str(folder)), torch.float32)
    for layer in range(2):
        stored.fill(f"model.layers.{layer}")
    return stored.model.model.layers


def test_the_parameters_of_experts_that_stay_are_those_numbers(tmp_path: Path) -> None:
    written = write_folder(tmp_path, draw_model(config()))
    experts = stored_layers(tmp_path)[1].mlp.experts
    read_all(experts)
    for name, expected in written.get_submodule(PATH).named_parameters():
        assert torch.equal(experts.get_parameter(name), expected), name


def test_a_layer_may_have_experts_that_are_not_quantised(tmp_path: Path) -> None:
    written = write_folder(tmp_path, draw_model(config()))

    def plain(tensors: dict[str, Any]) -> None:
        for name in ("gate_up_proj", "down_proj"):
            tensors[f"{PATH}.{name}"] = written.state_dict()[f"{PATH}.{name}"].clone()
            for ending in ("_blocks", "_scales"):
                del tensors[f"{PATH}.{name}{ending}"]

    edit(tmp_path, plain)
    for layer, module in enumerate(stored_layers(tmp_path)):
        read_all(module.mlp.experts)
        expected = written.model.layers[layer].mlp.experts.down_proj
        assert torch.equal(module.mlp.experts.down_proj, expected)


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_a_scale_that_is_no_number_is_refused_by_name(name: str, tmp_path: Path) -> None:
    write_folder(tmp_path, draw_model(config()))

    def damage(tensors: dict[str, Any]) -> None:
        tensors[f"{PATH}.{name}_scales"][2, 4, 1] = 255

    edit(tmp_path, damage)
    part = "gate" if name == "gate_up_proj" else "down"
    with pytest.raises(UnsupportedModelError, match=rf"experts\.2\.{part}_proj.*damaged"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({**SETTINGS, "block_size": 16}, "'mxfp4' with block_size cannot be read"),
        ({**SETTINGS, "a": 1, "b": 2}, "'mxfp4' with a, b cannot be read"),
        ({**SETTINGS, "dequantize": True}, "dequantize = True"),
        ({**SETTINGS, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert = 'lm_head'"),
    ],
)
def test_settings_that_are_not_known_are_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_folder(tmp_path, draw_model(config()), settings)
    edit(tmp_path, lambda tensors: tensors.clear())  # refused before any weight is read
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(str(tmp_path))


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize("ending", ["_blocks", "_scales"])
def test_a_tensor_that_lacks_is_refused_by_name(name: str, ending: str, tmp_path: Path) -> None:
    write_folder(tmp_path, draw_model(config()))
    edit(tmp_path, lambda tensors: tensors.pop(f"{PATH}.{name}{ending}"))
    with pytest.raises(UnsupportedModelError, match=rf"lack model.*\.1\..*{name}{ending}"):
        load_model(str(tmp_path))


def test_all_experts_of_a_layer_that_lack_are_refused_by_name(tmp_path: Path) -> None:
    write_folder(tmp_path, draw_model(config()))

    def without(tensors: dict[str, Any]) -> None:
        for name in [n for n in tensors if n.startswith(PATH)]:
            del tensors[name]

    edit(tmp_path, without)
    with pytest.raises(UnsupportedModelError, match=r"lacks model\.layers\.1\.mlp\.experts"):
        load_model(str(tmp_path))


def test_a_weight_beside_its_blocks_is_refused(tmp_path: Path) -> None:
    model = draw_model(config())
    write_folder(tmp_path, model)
    name = f"{PATH}.down_proj"
    edit(tmp_path, lambda tensors: tensors.update({name: model.state_dict()[name].clone()}))
    with pytest.raises(UnsupportedModelError, match=r"down_proj is there beside its _blocks"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("gate_up_proj_blocks", (4, 192, 2, 8), r"_blocks \[4, 192, 2, 8\] does not go with"),
        ("gate_up_proj_blocks", (4, 192, 32), r"_blocks is U8 \[4, 192, 32\].* of 4 dimensions"),
        ("gate_up_proj_blocks", (4, 192, 0, 16), r"U8 \[4, 192, 0, 16\]"),
        ("down_proj_scales", (4, 64, 2), r"does not go with.*_scales \[4, 64, 2\]"),
        ("down_proj_scales", (4, 192), r"U8 \[4, 192\].* of 3 dimensions"),
    ],
)
def test_tensors_of_other_shapes_are_refused_by_name(
    name: str, shape: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    write_folder(tmp_path, draw_model(config()))
    part = torch.zeros(shape, dtype=torch.uint8)
    edit(tmp_path, lambda tensors: tensors.update({f"{PATH}.{name}": part}))
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(str(tmp_path))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float32])
def test_bytes_are_unsigned(dtype: torch.dtype, tmp_path: Path) -> None:
    """The bits of others would be taken for places and exponents."""
    write_folder(tmp_path, draw_model(config()))

    def change(tensors: dict[str, Any]) -> None:
        tensors[f"{PATH}.down_proj_scales"] = tensors[f"{PATH}.down_proj_scales"].to(dtype)

    edit(tmp_path, change)
    with pytest.raises(UnsupportedModelError, match=r"down_proj_scales is [IF]\d+ .* to be U8"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("experts", "inputs", "outputs"), [(3, 64, 192), (4, 96, 192), (4, 64, 191), (4, 64, 128)]
)
def test_matrices_that_do_not_go_together_are_refused(
    experts: int, inputs: int, outputs: int, tmp_path: Path
) -> None:
    write_folder(tmp_path, draw_model(config()))
    parts = dict(zip(("_blocks", "_scales"), draw(experts, inputs, outputs, 0), strict=True))
    more = {f"{PATH}.gate_up_proj{ending}": part for ending, part in parts.items()}
    edit(tmp_path, lambda tensors: tensors.update(more))
    with pytest.raises(UnsupportedModelError, match=r"gate_up_proj of .* not go with its down"):
        load_model(str(tmp_path))


def test_experts_of_another_number_than_the_config_says_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, draw_model(config(num_local_experts=3)))
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(
        text.replace('"num_local_experts": 3', '"num_local_experts": 4')
    )
    with pytest.raises(UnsupportedModelError, match=r"experts\.3\.down_proj"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("length", [5, 40])
def test_greedy_tokens_are_those_of_the_numbers_in_the_folder(length: int, tmp_path: Path) -> None:
    """40 tokens are more than the window."""
    written = write_folder(tmp_path, draw_model(config()))
    (prompt,) = random_prompts((length,))
    expected = continue_prompt(written, tuple(prompt), NUM_TOKENS)
    assert generate(tmp_path, [prompt]) == [expected]


@pytest.mark.parametrize("length", [5, 40])
def test_with_inputs_of_8_bits_tokens_are_those_of_slow_products(
    length: int, tmp_path: Path
) -> None:
    written = write_folder(tmp_path, draw_model(config()))
    slow = with_byte_inputs(written, checkpoint_of(tmp_path))
    (prompt,) = random_prompts((length,))
    (generated,) = generate(tmp_path, [prompt], quantization="a8")
    assert furthest_behind(slow, prompt, generated) <= BY_ROUNDING


def test_experts_keep_their_four_bits(tmp_path: Path) -> None:
    write_folder(tmp_path, draw_model(config()))
    experts: Any = load_model(str(tmp_path)).model.model.layers[1].mlp.experts
    assert isinstance(experts, Experts)
    bits = 8 * (experts.nbytes - experts.num_experts * 4 * (2 * 96 + 64))  # less biases
    assert bits <= 5 * experts.num_experts * 3 * 96 * 64


def test_other_quantisation_of_these_weights_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, draw_model(config()))
    with pytest.raises(UnsupportedModelError, match="quantised already, by 'mxfp4'"):
        load_model(str(tmp_path), quantization="int4")
