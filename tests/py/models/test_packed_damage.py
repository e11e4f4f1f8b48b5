"""GPTQ, AWQ and compressed-tensors in folders that are damaged, or lack what they say they have:
refused by name, not computed with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file

from flexinfer.errors import UnsupportedModelError
from flexinfer.models.loading import load_model
from helpers.packed_cases import CASES, W8, fixed, tiny
from helpers.packed_folders import compressed_bytes, write_folder

QUERIES = "model.layers.0.self_attn.q_proj"
W8A8 = (W8, fixed(0, 8, True), compressed_bytes)


def edit(folder: Path, **tensors: torch.Tensor) -> None:
    """Put tensors of layer 0 (`self_attn__q_proj__bias`) into a folder."""
    file = folder / "model.safetensors"
    named = {f"model.layers.0.{k.replace('__', '.')}": tensor for k, tensor in tensors.items()}
    save_file({**load_file(file), **named}, file, {"format": "pt"})


def queries(folder: Path, part: str) -> torch.Tensor:
    return load_file(folder / "model.safetensors")[f"{QUERIES}.{part}"]


@pytest.mark.parametrize("shape", [(1,), (32,), (4096,), (0,), (1, 64)])
@pytest.mark.parametrize("layer", ["o_proj", "q_proj"])
def test_such_a_bias_has_as_many_numbers_as_the_layer_has_outputs(
    layer: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    """The kernel read on behind the end of a shorter one."""
    write_folder(tmp_path, tiny(), *CASES["gptq"])
    edit(tmp_path, **{f"self_attn__{layer}__bias": torch.ones(shape)})
    message = rf"{layer}\.bias is {re.escape(str(list(shape)))} in the checkpoint, and \[64\]"
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(str(tmp_path))


def test_a_bias_of_a_layer_that_the_model_has_not_is_refused_by_name(tmp_path: Path) -> None:
    write_folder(tmp_path, tiny(), *CASES["gptq"])
    edit(tmp_path, self_attn__o_proj__bias=torch.zeros(64))
    tensors = load_file(tmp_path / "model.safetensors")
    beyond = {k.replace("layers.0.", "layers.7."): v.clone() for k, v in tensors.items()}
    save_file({**beyond, **tensors}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"has model\.layers\.7\..*LlamaFor.* has not"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.bool])
@pytest.mark.parametrize("name", ["input_layernorm__weight", "self_attn__o_proj__bias"])
def test_what_is_not_quantised_has_no_integers(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """They were taken for the numbers."""
    write_folder(tmp_path, tiny(), *CASES["gptq"])
    edit(tmp_path, **{name: torch.ones(64, dtype=dtype)})
    message = rf"{name.replace('__', '.')} is of {dtype} in the checkpoint and has no scales"
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(str(tmp_path))


@pytest.mark.parametrize("lacking", [f"{QUERIES}.weight_zero_point", "weight_zero_point"])
def test_weights_that_are_not_symmetric_have_zero_points(lacking: str, tmp_path: Path) -> None:
    """They were read as if they were."""
    write_folder(tmp_path, tiny(), *CASES["compressed asymmetric"])
    file = tmp_path / "model.safetensors"
    tensors = {k: v for k, v in load_file(file).items() if not k.endswith(lacking)}
    save_file(tensors, file, {"format": "pt"})
    message = r"proj\.weight_packed is there, but not its weight_zero_point"
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(str(tmp_path))


def test_zero_points_of_w8a8_are_zeros(tmp_path: Path) -> None:
    """Others were passed over."""
    write_folder(tmp_path, tiny(), *W8A8)
    zeros = torch.zeros(queries(tmp_path, "weight_scale").shape, dtype=torch.int8)
    edit(tmp_path, self_attn__q_proj__weight_zero_point=zeros)
    load_model(str(tmp_path))
    zeros[3] = 50
    edit(tmp_path, self_attn__q_proj__weight_zero_point=zeros)
    with pytest.raises(UnsupportedModelError, match=r"q_proj\.weight_zero_point has others than 0"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.int64])
@pytest.mark.parametrize(
    ("case", "part"),
    [
        ("gptq", "qweight"),
        ("gptq", "qzeros"),
        ("awq", "qweight"),
        ("awq", "qzeros"),
        ("compressed asymmetric", "weight_packed"),
    ],
)
def test_integers_are_in_words_of_32_bits(
    case: str, part: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """The bits of float32 were taken for them."""
    write_folder(tmp_path, tiny(), *CASES[case])
    edit(tmp_path, **{f"self_attn__q_proj__{part}": queries(tmp_path, part).to(dtype)})
    with pytest.raises(
        UnsupportedModelError, match=rf"q_proj\.{part} is [FI]\d\d \[.*to be I32 of"
    ):
        load_model(str(tmp_path))


@pytest.mark.parametrize("shape", [(), (64,), (1, 8, 8), (0, 64), (64, 0)])
@pytest.mark.parametrize(
    ("case", "part"),
    [
        ("gptq", "qweight"),
        ("gptq", "scales"),
        ("awq", "qweight"),
        ("awq", "scales"),
        ("compressed", "weight_packed"),
        ("compressed", "weight_scale"),
    ],
)
def test_parts_of_other_dimensions_are_refused_by_name(
    case: str, part: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    write_folder(tmp_path, tiny(), *CASES[case])
    dtype = queries(tmp_path, part).dtype
    edit(tmp_path, **{f"self_attn__q_proj__{part}": torch.ones(shape, dtype=dtype)})
    # A scale for each output may have one dimension.
    is_known = part == "weight_scale" and shape == (64,)
    message = "scales of 1 groups" if is_known else rf"{part} is .*{re.escape(str(list(shape)))}"
    with pytest.raises(UnsupportedModelError, match=rf"q_proj.*{message}"):
        load_model(str(tmp_path))


def test_more_groups_than_inputs_are_refused_where_no_setting_says_how_many(
    tmp_path: Path,
) -> None:
    settings, *rest = CASES["gptq"]
    write_folder(tmp_path, tiny(), {**settings, "group_size": None}, *rest)
    scales = torch.ones(65, 64, dtype=torch.float16)
    edit(tmp_path, self_attn__q_proj__scales=scales)
    with pytest.raises(UnsupportedModelError, match=r"q_proj cannot be read: 65 groups do not go"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 5}}', "\xff"]
)
def test_an_index_that_says_no_files_is_refused_by_name(text: str, tmp_path: Path) -> None:
    write_folder(tmp_path, tiny(), *CASES["gptq"])
    (tmp_path / "model.safetensors.index.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UnsupportedModelError, match=r"index\.json' is damaged: .*weight_map"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("case", ["gptq", "awq"])
def test_a_weight_beside_packed_integers_is_refused(case: str, tmp_path: Path) -> None:
    write_folder(tmp_path, tiny(), *CASES[case])
    edit(tmp_path, self_attn__q_proj__weight=torch.ones(64, 64))
    with pytest.raises(UnsupportedModelError, match=r"q_proj has a weight beside its qweight"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_scales_that_are_no_numbers_are_refused_by_name(number: str, tmp_path: Path) -> None:
    """Each request that met them ended as an error."""
    write_folder(tmp_path, tiny(), *CASES["gptq"])
    scales = queries(tmp_path, "scales")
    scales[0, 3] = float(number)
    edit(tmp_path, self_attn__q_proj__scales=scales)
    with pytest.raises(UnsupportedModelError, match=r"q_proj\.weight has scales .* damaged"):
        load_model(str(tmp_path))
