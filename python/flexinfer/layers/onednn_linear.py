"""OneDnnLinear: a linear layer whose weight lies in the order in which oneDNN's kernel reads it.

oneDNN brings a plain bfloat16 weight into its blocked order at each call, which for the few rows of
a decode step costs as much as the product; packed once, it does not (docs/cpu_performance.md). In
float32 packing alone gains little: HostLinear packs those for the sake of its own kernel. The
operators are those that torch's own compiler emits for CPUs.
"""

from __future__ import annotations

from typing import Any

import torch

from flexinfer.layers.linear import OpaqueLinear
from flexinfer.runtime.torch_settings import back_by_huge_pages

PACKED_DTYPES = (torch.float32, torch.bfloat16)


class OneDnnLinear(OpaqueLinear):
    """x [..., in_features] -> [..., out_features]; REQUIRES `can_pack`."""

    compiles_row_counts = True

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """weight: [out_features, in_features], copied into its packed form."""
        super().__init__(weight, bias)
        self.weight = pack_weight(weight)
        """Opaque, but for its dtype and device."""
        back_by_huge_pages(
            torch.ops.mkldnn.data_ptr(self.weight), torch.ops.mkldnn._nbytes(self.weight)
        )

    def multiply(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """The residual is added while the product is still in registers."""
        if residual is not None:
            return linear_pointwise(x, residual, self.weight, self.bias, "add")
        return linear_pointwise(x, self.weight, self.bias, "none", [], "")


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
    return packed


def linear_pointwise(*arguments: Any) -> torch.Tensor:
    output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(*arguments)
    return output


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN has a packed kernel for this dtype here."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return dtype in PACKED_DTYPES and hasattr(torch.ops.mkldnn, "_linear_pointwise")
