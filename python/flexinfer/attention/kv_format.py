"""KVFormat: how quantised KV stands in the arena, and the slow reference of what the kernels do.

A head's numbers are bytes, its scale a float32 behind them in the same row, so that whoever moves
rows moves both:

    | number 0 | ... | number head_dim - 1 | scale, 4 bytes |        number = byte x scale

int8: scale = max |x| / 127, bytes from -127 to 127. fp8_e4m3: scale = max |x| / 448. A token's head
has bytes of its own, whatever stands beside it.

Keys of int8 stand rotated (`runtime/rotation.py`), by a power of two smaller, and queries are
rotated as they are read: a few numbers of a trained model's keys are much larger than the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexinfer.runtime.kernels import SCALE_BYTES
from flexinfer.runtime.rotation import rotated_inputs, slow_rotate

LARGEST = {"int8": 127.0, "fp8_e4m3": 448.0}
SMALLEST_MAXIMUM = 2.0**-100
"""Heads whose numbers are all smaller are stored as zeros: their scale would not be exact."""


@dataclass(frozen=True, slots=True)
class KVFormat:
    """Numbers of `dtype` as bytes with a scale for each token and head."""

    name: str
    """"int8" or "fp8_e4m3"."""
    dtype: torch.dtype
    """Of the numbers that come, and go."""

    def quantise(self, numbers: torch.Tensor) -> torch.Tensor:
        """[..., head_dim] of any float dtype to rows of uint8, [..., head_dim + SCALE_BYTES]."""
        numbers = numbers.float()
        largest = numbers.abs().amax(dim=-1, keepdim=True)
        counts = largest.isfinite() & (largest >= SMALLEST_MAXIMUM)
        most = torch.full_like(largest, LARGEST[self.name])  # a number / a tensor rounds twice
        factor = torch.where(counts, most / largest, 0)
        scale = torch.where(counts, largest / most, 0)
        scale = torch.where(largest.isfinite(), scale, torch.nan)
        scaled = torch.where(counts, numbers * factor, 0)
        if self.name == "int8":
            stored = scaled.round().to(torch.int8)
        else:
            stored = scaled.to(torch.float8_e4m3fn)
        return torch.cat((stored.view(torch.uint8), scale.view(torch.uint8)), dim=-1)

    def dequantise(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of uint8, [..., head_dim + SCALE_BYTES], to numbers [..., head_dim] of `dtype`."""
        return self._numbers(rows).to(self.dtype)

    def quantise_keys(self, keys: torch.Tensor) -> torch.Tensor:
        """`quantise`, of keys as they stand."""
        if not self.rotates_keys:
            return self.quantise(keys)
        return self.quantise(slow_rotate(keys.float() / key_divisor(keys.shape[-1])))

    def dequantise_keys(self, rows: torch.Tensor) -> torch.Tensor:
        """`dequantise`, of keys."""
        if not self.rotates_keys:
            return self.dequantise(rows)
        keys = self._numbers(rows)
        width = keys.shape[-1]
        return slow_rotate(keys * (key_divisor(width) / rotated_inputs(width))).to(self.dtype)

    @property
    def rotates_keys(self) -> bool:
        return self.name == "int8"

    def _numbers(self, rows: torch.Tensor) -> torch.Tensor:
        byte = torch.int8 if self.name == "int8" else torch.float8_e4m3fn
        stored = rows[..., :-SCALE_BYTES].contiguous().view(byte)
        scale = rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
        return stored.float() * scale


def describe_kv(kv_cache_dtype: str) -> str:
    """Of `EngineConfig`: the same where bytes stand for the same numbers, which those of a process
    with older code may not."""
    rotates = kv_cache_dtype != "auto" and KVFormat(kv_cache_dtype, torch.float32).rotates_keys
    return f"{kv_cache_dtype}, keys rotated" if rotates else kv_cache_dtype


def key_divisor(width: int) -> int:
    """By what keys of so many numbers are divided before they are rotated: about as large as they
    were they are afterwards."""
    return 1 << rotated_inputs(width).bit_length() // 2
