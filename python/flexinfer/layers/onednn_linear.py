"""PackedLinear: a linear layer whose weight lies in the order in which oneDNN's kernel reads it.

oneDNN brings a plain bfloat16 weight into its blocked order at each call, which for the few rows of
a decode step costs as much as the product; packed once, it does not (docs/lean_step.md). In float32
packing alone gains little: PanelLinear packs those for the sake of its own kernel. The operators
are those that torch's own compiler emits for CPUs.
"""

from __future__ import annotations

from functools import cache
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch

from flexinfer.runtime.torch_settings import back_by_huge_pages

PACKED_DTYPES = (torch.float32, torch.bfloat16)


OPERATOR = "packed_linear(Tensor x, Tensor? residual, int layer, int out_features) -> Tensor"

_layers: WeakValueDictionary[int, PackedLinear] = WeakValueDictionary()
_next_layer = count()


class PackedLinear(torch.nn.Module):
    """x [..., in_features] -> [..., out_features]. Not for training.

    In a compiled model it is the operator flexinfer::packed_linear, as a compiled graph can take no
    opaque weight for its input: the operator finds it by the layer's number.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """weight: [out_features, in_features], copied into its packed form."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = pack_weight(weight)
        """Opaque, but for its dtype and device."""
        back_by_huge_pages(
            torch.ops.mkldnn.data_ptr(self.weight), torch.ops.mkldnn._nbytes(self.weight)
        )
        self.bias = None if bias is None else bias.detach()
        register()
        self.number = next(_next_layer)
        _layers[self.number] = self

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """residual: [..., out_features], added while the product is still in registers."""
        if torch.compiler.is_compiling():
            output: torch.Tensor = torch.ops.flexinfer.packed_linear(
                x, residual, self.number, self.out_features
            )
            return output
        return self.multiply(x, residual)

    def multiply(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """residual + x weight^T + bias, at once."""
        if residual is not None:
            return linear_pointwise(x, residual, self.weight, self.bias, "add")
        return linear_pointwise(x, self.weight, self.bias, "none", [], "")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


@cache
def register() -> torch.library.Library:
    """Make the operator known to torch; once a process. It lives as long as the library object."""
    library = torch.library.Library("flexinfer", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(OPERATOR)  # type: ignore[no-untyped-call]
    library.impl("packed_linear", _packed_linear, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake("flexinfer::packed_linear", _packed_linear_shape, lib=library)
    return library


def layer_of(number: int) -> PackedLinear:
    """The layer with this number, while it lives; else KeyError."""
    return _layers[number]


def _packed_linear(
    x: torch.Tensor, residual: torch.Tensor | None, layer: int, out_features: int
) -> torch.Tensor:
    return _layers[layer].multiply(x, residual)


def _packed_linear_shape(
    x: torch.Tensor, residual: torch.Tensor | None, layer: int, out_features: int
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


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
