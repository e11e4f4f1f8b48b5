"""Weights in fp8, nvfp4 and mxfp4 as their authors describe them, number by number, and settings of
folders that have them; `packed_folders` writes these."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from helpers.mxfp4_folders import MAGNITUDES
from helpers.packed_cases import compressed_settings

FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "modules_to_not_convert": ["lm_head"],
}
FLOATS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "actorder": None}
TOKENS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
FOURS = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}
NVFP4_WEIGHTS = {**FOURS, "strategy": "tensor_group", "group_size": 16}
NVFP4_INPUTS = {**NVFP4_WEIGHTS, "dynamic": "local"}
MXFP4_WEIGHTS = {**FOURS, "strategy": "group", "group_size": 32}


def e4m3(code: int) -> float:
    """What a byte stands for: 1 bit of sign, 4 of exponent, 3 of mantissa; 0x7f is no number."""
    sign, exponent, mantissa = 1 - (code >> 7) * 2, code >> 3 & 15, code & 7
    assert code & 127 < 127
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


@dataclass(frozen=True)
class Scaled:
    """A weight of 8 bits with scales of blocks."""

    codes: torch.Tensor
    """uint8 [outputs, inputs]"""
    scales: torch.Tensor
    """[rows, columns]"""
    block: tuple[int, int]

    def weight(self) -> torch.Tensor:
        """float32 [outputs, inputs]"""
        scales = self.scales.double().tolist()
        rows = [
            [
                e4m3(code) * scales[i // self.block[0]][j // self.block[1]]
                for j, code in enumerate(row)
            ]
            for i, row in enumerate(self.codes.tolist())
        ]
        return torch.tensor(rows, dtype=torch.float64).float()


def draw_scaled(
    outputs: int, inputs: int, seed: int, *, block: tuple[int, int], dtype: torch.dtype
) -> Scaled:
    """block: 0 is all outputs or inputs. Numbers are around 0.1."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 255, (outputs, inputs), generator=generator)
    codes = codes.where(codes & 127 < 127, codes - 1).to(torch.uint8)
    rows, columns = block[0] or outputs, block[1] or inputs
    shape = -(-outputs // rows), -(-inputs // columns)
    scales = (0.2 + torch.rand(shape, generator=generator)) * 2e-3
    return Scaled(codes, scales.to(dtype), (rows, columns))


def scaled_parts(
    of: Scaled, scale: str, inputs: str = "", dims: int = 2
) -> dict[str, torch.Tensor]:
    """scale, inputs: what the scales are called; dims: that scales have."""
    scales = of.scales if dims == 2 else of.scales.flatten()
    parts = {
        "weight": of.codes.view(torch.float8_e4m3fn).clone(),
        scale: (scales if dims else scales[0]).clone(),
    }
    return parts | ({inputs: torch.tensor(0.5)} if inputs else {})


@dataclass(frozen=True)
class Fp4:
    """A weight of 4 bits by the table of E2M1."""

    codes: torch.Tensor
    """int64 [outputs, inputs]"""
    scales: torch.Tensor
    """uint8 [outputs, groups]: as e4m3 with a factor, else exponents"""
    factor: float | None

    def weight(self) -> torch.Tensor:
        """float32 [outputs, inputs]"""
        group = self.codes.shape[1] // self.scales.shape[1]
        rows = [
            [self._number(code, scales[j // group]) for j, code in enumerate(row)]
            for row, scales in zip(self.codes.tolist(), self.scales.tolist(), strict=True)
        ]
        return torch.tensor(rows, dtype=torch.float64).float()

    def _number(self, code: int, scale: int) -> float:
        number = (-1.0 if code & 8 else 1.0) * MAGNITUDES[code & 7]
        if self.factor is None:
            return number * 2.0 ** (scale - 127)
        return number * float(torch.tensor(e4m3(scale)) / torch.tensor(self.factor))


def draw_fp4(outputs: int, inputs: int, seed: int, *, group: int, has_factor: bool) -> Fp4:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (outputs, inputs), generator=generator)
    least, most = (0x40, 0x7F) if has_factor else (120, 124)
    shape = outputs, inputs // group
    scales = torch.randint(least, most, shape, generator=generator, dtype=torch.uint8)
    return Fp4(codes, scales, 1234.5 + seed if has_factor else None)


def fp4_parts(of: Fp4, has_input_factor: bool = False) -> dict[str, torch.Tensor]:
    parts = {
        "weight_packed": (of.codes[:, ::2] | of.codes[:, 1::2] << 4).to(torch.uint8),
        "weight_scale": of.scales.clone(),
    }
    if of.factor is not None:
        parts["weight_scale"] = parts["weight_scale"].view(torch.float8_e4m3fn)
        parts["weight_global_scale"] = torch.tensor([of.factor])
    if has_input_factor:
        parts["input_global_scale"] = torch.tensor([300.0])
    return parts


def floats(strategy: str, inputs: Any = TOKENS, **more: Any) -> dict[str, Any]:
    """Settings of compressed-tensors for weights of 8 bits."""
    return compressed_settings({**FLOATS, "strategy": strategy, **more}, inputs, "float-quantized")


def drawn(block: tuple[int, int], dtype: torch.dtype = torch.float32) -> Any:
    return partial(draw_scaled, block=block, dtype=dtype)


INVERSE = partial(scaled_parts, scale="weight_scale_inv")
DIRECT = partial(scaled_parts, scale="weight_scale")
STATIC = {**TOKENS, "strategy": "tensor", "dynamic": False}
WHOLE = {**FP8, "activation_scheme": "static", "weight_block_size": None}
SCALED_CASES: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "fp8": (FP8, drawn((32, 32)), INVERSE),
    "fp8 scales in bfloat16": (FP8, drawn((32, 32), torch.bfloat16), INVERSE),
    "fp8 blocks that are cut off": (
        {**FP8, "weight_block_size": [40, 28], "scale_fmt": "ue8m0"},
        drawn((40, 28)),
        INVERSE,
    ),
    "fp8 one block": (
        {**FP8, "weight_block_size": [128, 128]},
        drawn((0, 0)),
        INVERSE,
    ),
    "fp8 static": (WHOLE, drawn((0, 0)), partial(INVERSE, inputs="activation_scale", dims=0)),
    "fp8 of AutoFP8": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        drawn((0, 0)),
        partial(DIRECT, inputs="input_scale", dims=1),
    ),
    "compressed by output": (floats("channel"), drawn((1, 0), torch.bfloat16), DIRECT),
    "compressed by output, one dimension": (
        floats("channel", None),
        drawn((1, 0)),
        partial(DIRECT, dims=1),
    ),
    "compressed static": (
        floats("tensor", STATIC),
        drawn((0, 0), torch.bfloat16),
        partial(DIRECT, inputs="input_scale", dims=1),
    ),
    "compressed blocks": (
        floats("block", {**TOKENS, "strategy": "group"}, block_structure=[32, 48]),
        drawn((32, 48)),
        DIRECT,
    ),
}
FP4_CASES: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "nvfp4": (
        compressed_settings(NVFP4_WEIGHTS, NVFP4_INPUTS, "nvfp4-pack-quantized"),
        partial(draw_fp4, group=16, has_factor=True),
        partial(fp4_parts, has_input_factor=True),
    ),
    "nvfp4 W4A16": (
        compressed_settings(NVFP4_WEIGHTS, None, "nvfp4-pack-quantized"),
        partial(draw_fp4, group=16, has_factor=True),
        fp4_parts,
    ),
    "mxfp4": (
        compressed_settings(
            MXFP4_WEIGHTS, {**MXFP4_WEIGHTS, "dynamic": True}, "mxfp4-pack-quantized"
        ),
        partial(draw_fp4, group=32, has_factor=False),
        fp4_parts,
    ),
}
