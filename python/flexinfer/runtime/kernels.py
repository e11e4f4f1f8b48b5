"""What the CPU kernels know of number formats and instruction sets, in torch's terms."""

from __future__ import annotations

import torch

from flexinfer import _kernels

DTYPES: dict[torch.dtype, int] = {
    getattr(torch, name): index for name, index in _kernels.DTYPES.items()
}
"""The numbers by which the kernels know dtypes (kernels::DType)."""
KV_FORMATS: dict[str, int] = _kernels.KV_FORMATS
"""The same of formats of KV (kernels::KVFormat)."""
SCALE_FORMATS: dict[torch.dtype, int] = {
    torch.float32: _kernels.SCALE_FORMATS["float32"],
    torch.float16: _kernels.SCALE_FORMATS["float16"],
    torch.float8_e8m0fnu: _kernels.SCALE_FORMATS["powers"],
    torch.uint8: _kernels.SCALE_FORMATS["blocks"],
}
"""The same of formats of a weight's scales (kernels::ScaleFormat), by what they are laid out in."""
SCALE_BLOCK: int = _kernels.SCALE_BLOCK
"""Inputs of a block of scales."""
SCALE_BYTES: int = _kernels.SCALE_BYTES
"""Of a scale behind the bytes of a head of quantised KV."""


def available_isas() -> list[str]:
    """Instruction sets that this build and this CPU both have, best last."""
    return _kernels.available_isas()


def available_quantised_isas() -> list[str]:
    """The same of products with quantised weights, for which there are more."""
    return _kernels.available_quantised_isas()
