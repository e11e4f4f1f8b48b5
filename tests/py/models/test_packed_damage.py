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
from helpers.packed_cases import CASES, tiny
from helpers.packed_folders import write_folder


def edit(folder: Path, **tensors: torch.Tensor) -> None:
    """Put tensors of layer 0 (`self_attn__q_proj__bias`) into a folder."""
    file = folder / "model.safetensors"
    named = {f"model.layers.0.{k.replace('__', '.')}": tensor for k, tensor in tensors.items()}
    save_file({**load_file(file), **named}, file, {"format": "pt"})


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
