"""Folders in fp8, nvfp4 and mxfp4 that are damaged, or whose settings are not known: refused by
name, before any weight is read where that can be seen."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file

from flexinfer.errors import UnsupportedModelError
from flexinfer.models.loading import load_model
from flexinfer.models.model_config import load_config
from flexinfer.models.quantisation import open_checkpoint
from helpers.float_folders import FP4_CASES, FP8, SCALED_CASES
from helpers.packed_cases import OWN, changed, tiny
from helpers.packed_folders import edit, write_folder

CASES = {**SCALED_CASES, **FP4_CASES}
CHANNELS, BLOCKS, NVFP4, MXFP4 = (
    CASES[case][0] for case in ("compressed by output", "compressed blocks", "nvfp4", "mxfp4")
)
QUERIES = "model.layers.0.self_attn.q_proj"
E4M3 = torch.float8_e4m3fn


def put(folder: Path, part: str, tensor: torch.Tensor) -> None:
    edit(folder, lambda tensors: tensors.update({f"{QUERIES}.{part}": tensor}))


def open_folder(folder: Path) -> Any:
    """Reads no weight."""
    return open_checkpoint(str(folder), load_config(str(folder)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({**FP8, "fmt": "e5m2"}, "'fp8' with fmt = 'e5m2'"),
        ({**FP8, "activation_scheme": "other"}, "activation_scheme = 'other'"),
        ({**FP8, "scale_fmt": "e8"}, "scale_fmt = 'e8'"),
        ({**FP8, "expert_dtype": "fp4"}, "expert_dtype = 'fp4'"),
        ({**FP8, "modules_to_convert": ["embed"]}, "modules_to_convert = "),
        ({**FP8, "kv_cache_scheme": "static"}, "kv_cache_scheme = 'static'"),
        ({**FP8, "weight_per_tensor": True}, "weight_per_tensor = True"),
        ({**FP8, "ignored_layers": "lm_head"}, "ignored_layers = 'lm_head'"),
        ({**FP8, "weight_block_size": [128]}, r"weight_block_size = \[128\].*two numbers"),
        ({**FP8, "weight_block_size": [0, 128]}, r"weight_block_size = \[0, 128\]"),
        ({**FP8, "weight_block_size": 128}, "weight_block_size = 128"),
        ({**FP8, "more": 1, "another": 2}, "'fp8' with another, more cannot be read"),
        (changed(CHANNELS, f"{OWN}/weights/num_bits", 4), "num_bits = 4.*known: 8"),
        (changed(CHANNELS, f"{OWN}/weights/symmetric", False), "symmetric = False"),
        (changed(CHANNELS, f"{OWN}/weights/strategy", "group"), "strategy = 'group'"),
        (changed(CHANNELS, f"{OWN}/weights/dynamic", True), "dynamic = True"),
        (changed(CHANNELS, f"{OWN}/weights/actorder", "group"), "actorder = 'group'"),
        (changed(CHANNELS, f"{OWN}/weights", {"num_bits": 8}), "type = 'int'"),
        (changed(CHANNELS, f"{OWN}/input_activations/type", "int"), "type = 'int'"),
        (changed(CHANNELS, f"{OWN}/output_activations", {"num_bits": 8}), "output_activations"),
        (changed(CHANNELS, "kv_cache_scheme", {"num_bits": 8}), "kv_cache_scheme = "),
        (changed(BLOCKS, f"{OWN}/weights/block_structure", None), r"block_structure = \[\]"),
        (changed(BLOCKS, f"{OWN}/weights/block_structure", "128x128"), "= '128x128'"),
        (changed(NVFP4, f"{OWN}/weights/group_size", 32), "group_size = 32.*known: 16"),
        (changed(NVFP4, f"{OWN}/weights/strategy", "group"), "strategy = 'group'"),
        (changed(NVFP4, f"{OWN}/weights/num_bits", 8), "num_bits = 8"),
        (changed(MXFP4, f"{OWN}/weights/group_size", 16), "group_size = 16.*known: 32"),
        (changed(MXFP4, f"{OWN}/weights/strategy", "tensor_group"), "strategy = 'tensor_group'"),
        (changed(NVFP4, "format", "mxfp8-quantized"), "format = 'mxfp8-quantized'"),
    ],
)
def test_settings_that_are_not_known_are_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tiny().config.save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**text, "quantization_config": settings}))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(str(tmp_path))


NEEDED = [
    *((case, "weight_scale_inv") for case in SCALED_CASES if case.startswith("fp8 s")),
    *((case, "weight_scale") for case in CASES if not case.startswith("fp8")),
    ("nvfp4", "weight_global_scale"),
]


@pytest.mark.parametrize(("case", "part"), NEEDED)
def test_a_part_that_lacks_is_refused_by_name(case: str, part: str, tmp_path: Path) -> None:
    write_folder(tmp_path, tiny(), *CASES[case])
    edit(tmp_path, lambda tensors: tensors.pop(f"{QUERIES}.{part}"))
    with pytest.raises(UnsupportedModelError, match=f"q_proj.* is there, but not its {part}"):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    ("case", "part", "shape", "dtype"),
    [
        ("fp8", "weight_scale_inv", (2, 3), torch.float32),
        ("fp8", "weight_scale_inv", (64, 1), torch.float32),
        ("fp8", "weight_scale_inv", (1,), torch.float32),
        ("fp8", "weight_scale_inv", (), torch.float32),
        ("fp8", "weight_scale_inv", (2, 2), torch.uint8),
        ("fp8", "weight_scale_inv", (2, 2), torch.float8_e8m0fnu),
        ("fp8", "weight", (2, 64, 64), E4M3),
        ("fp8", "weight", (64, 0), E4M3),
        ("fp8", "weight", (64, 64), torch.float8_e5m2),
        ("fp8", "bias", (64,), E4M3),
        ("fp8 static", "weight_scale_inv", (2, 2), torch.float32),
        ("fp8 static", "weight_scale_inv", (64, 1), torch.float32),
        ("compressed by output", "weight_scale", (), torch.float32),
        ("compressed by output", "weight_scale", (1, 1), torch.float32),
        ("compressed by output", "weight_scale", (64, 2), torch.float32),
        ("compressed static", "weight_scale", (64,), torch.float32),
        ("compressed blocks", "weight_scale", (2, 1), torch.float32),
        ("nvfp4", "weight_packed", (64, 32), torch.int8),
        ("nvfp4", "weight_packed", (64,), torch.uint8),
        ("nvfp4", "weight_scale", (64, 4), torch.float32),
        ("nvfp4", "weight_scale", (64, 2), E4M3),
        ("nvfp4", "weight_scale", (1, 4), E4M3),
        ("nvfp4", "weight_global_scale", (2,), torch.float32),
        ("nvfp4", "weight_global_scale", (1,), torch.float16),
        ("mxfp4", "weight_scale", (64, 4), torch.uint8),
        ("mxfp4", "weight_scale", (64, 2), E4M3),
    ],
)
def test_parts_of_other_shapes_or_dtypes_are_refused_by_name(
    case: str, part: str, shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path
) -> None:
    write_folder(tmp_path, tiny(), *CASES[case])
    put(tmp_path, part, torch.ones(shape).to(dtype))
    message = rf"q_proj\.{part} (is .*{re.escape(str(list(shape)))}|is F8|has to be one number)"
    with pytest.raises(UnsupportedModelError, match=message):
        open_folder(tmp_path)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.norm.weight"])
def test_numbers_of_8_bits_without_scales_are_refused_by_name(name: str, tmp_path: Path) -> None:
    write_folder(tmp_path, tiny(), *CASES["fp8"])
    edit(tmp_path, lambda tensors: tensors.update({name: tensors[name].to(E4M3)}))
    with pytest.raises(UnsupportedModelError, match=f"{name.rpartition('.')[0]}"):
        open_folder(tmp_path)


def test_numbers_of_8_bits_in_a_folder_of_4_are_refused_by_name(tmp_path: Path) -> None:
    write_folder(tmp_path, tiny(), *CASES["nvfp4"])
    name = "model.embed_tokens.weight"
    edit(tmp_path, lambda tensors: tensors.update({name: tensors[name].to(E4M3)}))
    with pytest.raises(UnsupportedModelError, match=f"{name} is of torch.float8.* has no scales"):
        load_model(str(tmp_path))


def test_scales_of_two_names_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, tiny(), *CASES["fp8"])
    put(tmp_path, "weight_scale", torch.ones(2, 2))
    with pytest.raises(UnsupportedModelError, match=r"two names \(weight_scale_inv, weight_scale"):
        open_folder(tmp_path)


@pytest.mark.parametrize("part", ["k_scale", "input_scale", "weight_zero_point"])
def test_tensors_that_would_be_passed_over_are_refused_by_name(part: str, tmp_path: Path) -> None:
    """Inputs are rounded by no known scale where settings do not say so."""
    write_folder(tmp_path, tiny(), *CASES["fp8"])
    put(tmp_path, part, torch.ones(1))
    with pytest.raises(UnsupportedModelError, match=rf"has model\.layers\.0\..*\.{part}, which a"):
        load_model(str(tmp_path))


def test_scales_beside_a_weight_that_is_not_quantised_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, tiny(), *CASES["fp8"])
    put(tmp_path, "weight", torch.ones(64, 64))
    with pytest.raises(UnsupportedModelError, match=r"has .*q_proj\.weight_scale_inv, which a"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("quantization", ["auto", "int4"])
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_codes_of_8_bits_that_are_no_number_are_refused_by_name(
    code: int, quantization: str, tmp_path: Path
) -> None:
    write_folder(tmp_path, tiny(), *CASES["fp8"])
    codes = load_file(tmp_path / "model.safetensors")[f"{QUERIES}.weight"].view(torch.uint8)
    codes[40, 5] = code
    put(tmp_path, "weight", codes.view(E4M3))
    with pytest.raises(UnsupportedModelError, match=r"0\.self_attn\.q_proj\.weight .*damaged"):
        load_model(str(tmp_path), quantization=quantization)


@pytest.mark.parametrize(
    ("case", "part", "number"),
    [
        ("fp8", "weight_scale_inv", float("nan")),
        ("fp8", "weight_scale_inv", float("inf")),
        ("fp8", "weight_scale_inv", 1e38),  # beyond float32 with most numbers
        ("compressed by output", "weight_scale", float("-inf")),
        ("nvfp4", "weight_scale", float("nan")),
        ("nvfp4", "weight_global_scale", 0.0),
        ("nvfp4", "weight_global_scale", float("nan")),
        ("mxfp4", "weight_scale", 255),
    ],
)
def test_scales_that_are_no_numbers_are_refused_by_name(
    case: str, part: str, number: float, tmp_path: Path
) -> None:
    write_folder(tmp_path, tiny(), *CASES[case])
    scales = load_file(tmp_path / "model.safetensors")[f"{QUERIES}.{part}"]
    flat = scales.float().flatten()
    flat[-1] = number
    put(tmp_path, part, flat.view(scales.shape).to(scales.dtype))
    with pytest.raises(UnsupportedModelError, match=r"0\.self_attn\.q_proj\.weight .*damaged"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("case", ["fp8", "nvfp4"])
def test_a_gpu_is_refused(case: str, tmp_path: Path) -> None:
    write_folder(tmp_path, tiny(), *CASES[case])
    edit(tmp_path, lambda tensors: tensors.update({"x": torch.zeros(1)}))  # no weight is read
    with pytest.raises(UnsupportedModelError, match="kernels for the CPU alone, not for cuda"):
        load_model(str(tmp_path), device="cuda")


def test_weights_of_4_bits_stay_so(tmp_path: Path) -> None:
    write_folder(tmp_path, tiny(), *CASES["nvfp4"])
    with pytest.raises(UnsupportedModelError, match="quantised already, by 'compressed-tensors'"):
        load_model(str(tmp_path), quantization="int8")
