"""Flash kernels over references instead of GPU code, by name, and small arenas for them."""

from __future__ import annotations

import torch

from flexinfer.attention.base import LayerKV
from flexinfer.attention.flash_kernels import DecodeKernel, Flash2, Flash3, Flash4, PrefillKernel
from flexinfer.attention.torch_flash import TorchFlash
from helpers.flash_reference import FlashAttn2, FlashAttn3, FlashAttn4, TorchOperator

HEAD_DIM, MAX_SEQ_LEN, NUM_SLOTS = 8, 300, 6
EXACT = (torch.float32,)

Kernels = tuple[DecodeKernel, PrefillKernel]


def flash2(dtypes: tuple[torch.dtype, ...] = EXACT) -> Kernels:
    kernel = Flash2(FlashAttn2(dtypes))
    return kernel, kernel


def flash3(dtypes: tuple[torch.dtype, ...] = EXACT) -> Kernels:
    return Flash2(FlashAttn2(dtypes)), Flash3(FlashAttn3(dtypes))


def flash4(dtypes: tuple[torch.dtype, ...] = EXACT) -> Kernels:
    return Flash2(FlashAttn2(dtypes)), Flash4(FlashAttn4(dtypes))


def torch_flash(dtypes: tuple[torch.dtype, ...] = EXACT) -> Kernels:
    kernel = TorchFlash(TorchOperator(dtypes))
    return kernel, kernel


KINDS = {"flash2": flash2, "flash3": flash3, "flash4": flash4, "torch": torch_flash}


def make_layers(num_kv_heads: int, dtype: torch.dtype = torch.float32) -> list[LayerKV]:
    """Interleaved arenas of two layers: token stride spans both; unwritten rows are NaN."""
    shape = (NUM_SLOTS, MAX_SEQ_LEN, 2, 2, num_kv_heads, HEAD_DIM)
    arena = torch.full(shape, torch.nan, dtype=dtype)
    return [LayerKV(arena[:, :, i, 0], arena[:, :, i, 1]) for i in range(2)]


def half_layers() -> list[LayerKV]:
    return make_layers(2, torch.bfloat16)
